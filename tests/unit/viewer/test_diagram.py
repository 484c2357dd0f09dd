"""The diagram of a step: the stages and columns of the configuration, drawn with names that cannot leave their place."""

import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from support.launch import hone

from hone.apps.lab.diagram import RIGHT, WIDTH, mermaid, svg
from hone.apps.lab.viewer.overview import picture
from hone.config import load_config
from hone.config.tree import RLConfig
from hone.trainers.algorithm import Algorithm
from hone.trainers.stages import check_stages, data_flow

SVG = "{http://www.w3.org/2000/svg}"
NODE = re.compile(r'^  s(\d+)\["<b>(\w+)</b><br/>', re.MULTILINE)
ARROW = re.compile(r'^  s(\d+) (?:-->|-\.->)(?:\|"([^"|]*)"\|)? s(\d+)$', re.MULTILINE)
RUNS = {
    "grpo": (),
    "ppo": ("algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true"),
    "remax": ("algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.free_cache_engine=true"),
    "rae": ("algorithm.adv_estimator=rae",),
    "online_dpo": ("actor_rollout_ref.actor.preference_loss.loss_mode=dpo",),
    "corrected": ("algorithm.rollout_correction.rollout_is=token",),
    "streamed": ("trainer.async_training.stream=true",),
    "bypass": ("algorithm.rollout_correction.bypass_mode=true",),
}


def flow_of(*overrides: str) -> dict:
    config = load_config(RLConfig, ["data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", *overrides])
    stages = Algorithm.planned(config)
    check_stages(stages)
    return data_flow(config, stages)


@pytest.mark.parametrize("run", RUNS)
def test_every_column_comes_from_the_last_stage_before_that_adds_it(run: str) -> None:
    flow = flow_of(*RUNS[run])
    text, names = mermaid(flow), [stage["name"] for stage in flow["stages"]]
    assert NODE.findall(text) == [(str(number), name) for number, name in enumerate(names)]
    drawn = {
        (int(a), int(b), column.split()[0])
        for a, label, b in ARROW.findall(text)
        for column in label.split(", ")
        if column
    }
    expected = set()
    for number, stage in enumerate(flow["stages"]):
        for column in stage["needs"]:
            makers = [place for place in range(number) if column in flow["stages"][place]["adds"]]
            expected.add((makers[-1], number, column))
    assert drawn - {(len(names) - 1, 0, "weights")} == expected
    words = {text for node in ET.fromstring(svg(flow)).iter(f"{SVG}text") for text in [node.text or ""]}
    assert set(names) <= words and any("8 sequences" in word for word in words)


def test_what_the_update_compares_with_is_drawn() -> None:
    def reads(*overrides: str) -> list[str]:
        stages = {stage["name"]: stage for stage in flow_of(*overrides)["stages"]}
        return stages["update_actor"]["needs"]

    assert "ref_log_probs" in reads("actor_rollout_ref.actor.preference_loss.loss_mode=dpo")
    own_pass = "actor_rollout_ref.actor.recompute_old_log_probs=true"
    assert "rollout_is_weights" in reads("algorithm.rollout_correction.rollout_is=token", own_pass)
    assert reads("algorithm.adv_estimator=gae", "trainer.critic_warmup=5")  # the step after the warm-up
    assert "7 steps" in svg(flow_of("trainer.async_training.max_staleness=7"))
    kept = WIDTH - RIGHT
    for run in RUNS.values():
        for node in ET.fromstring(svg(flow_of("actor_rollout_ref.rollout.n=8", *run))).iter(f"{SVG}text"):
            assert node.get("class") != "column" or len(node.text or "") * 7.3 <= kept


def test_pools_and_roles_are_those_of_the_run() -> None:
    separate = (
        "trainer.runtime=ray",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.enable_resource_pool=true",
    )
    flow = flow_of(*separate, "actor_rollout_ref.rollout.n_gpus_per_node=3")
    assert [(pool["name"], pool["processes"]) for pool in flow["pools"]] == [("main", 2), ("rollout", 3)]
    assert "rollout in pool rollout" in mermaid(flow) and "actor in pool main" in svg(flow)
    assert {stage["name"]: stage["role"] for stage in flow["stages"]}["update_actor"] == "actor"


def test_names_of_others_stay_text() -> None:
    flow = flow_of()
    hostile = '"]; click s0 "javascript:alert(1)" <script>alert(1)</script> </text>|'
    flow["stages"][0] |= {"name": hostile, "role": hostile, "adds": [hostile, *flow["stages"][0]["adds"]]}
    flow["stages"][1]["needs"] = [hostile]
    flow["pools"][0]["name"] = hostile
    assert all(node.tag.removeprefix(SVG) != "script" for node in ET.fromstring(svg(flow)).iter())
    known = {'"', "<b>", "</b>", "<br/>"}
    for line in mermaid(flow).splitlines():
        label = line.partition('"')[2].rpartition('"')[0]
        assert '"' not in label and not set(re.findall(r"</?[a-z]+/?>", label)) - known


@pytest.mark.parametrize("damaged", [None, {}, [], "x", 7, {"stages": 3}, {"stages": [{}], "pools": [], "bytes": {}}])
def test_a_record_without_a_flow_has_no_picture(damaged: object) -> None:
    assert picture(damaged) == ""
    assert picture(flow_of()).startswith("data:image/svg+xml;base64,")


def test_the_command_writes_a_picture_or_says_what_it_draws(tmp_path: Path) -> None:
    ended = hone(
        "config", "show", "--diagram", tmp_path / "step.svg", "algorithm.adv_estimator=rloo", log=tmp_path / "log"
    )
    assert ended.code == 0, ended.output
    assert ET.parse(tmp_path / "step.svg").getroot().tag == f"{SVG}svg"
    for arguments in (
        ["--of", "sft", "--diagram", "-"],
        ["--diagram", str(tmp_path / "step.png")],
        ["--diagram", str(tmp_path / "none/step.svg")],
        ["--diagram", str(tmp_path / "step")],
    ):
        refused = hone("config", "show", *arguments, log=tmp_path / "log")
        assert refused.code == 2 and "--diagram" in refused.output
    assert json.loads(json.dumps(flow_of())) == flow_of()
