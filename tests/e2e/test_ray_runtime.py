"""The same program on Ray: the same numbers with one worker bit for bit, with two within the rounding of sums."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from support.archives import records
from support.choice import CORE
from support.launch import hone
from support.python_objects import AlwaysCalls, Echo, double, tool_answered
from support.small_tools import tools_model
from support.world import World, metrics, rl_command

from hone.api import train as api_train
from hone.cluster.ray.connection import SETTINGS
from hone.config import RLConfig, load_config
from hone.insight.records import weight_versions
from hone.trainers.rl import train

pytestmark = pytest.mark.long("hone/cluster", "hone/trainers/algorithm.py")

RATE = "actor_rollout_ref.actor.optim.lr=1e-3"
CLIP_COV = ("loss_mode=clip_cov", "clip_cov_ratio=0.2", "clip_cov_lb=0.0", "clip_cov_ub=100.0")
KINDS = {
    "grpo": ("grpo", RATE),
    "once": ("grpo", RATE, "actor_rollout_ref.actor.ppo_mini_batch_size=12"),
    "ppo": ("ppo", RATE),
    "lora": ("grpo", RATE, "actor_rollout_ref.model.lora_rank=4"),
    "clip_cov": ("grpo", RATE, *(f"actor_rollout_ref.actor.policy_loss.{key}" for key in CLIP_COV)),
}
COPIED = "rollout/canary_gap"
WAY = "actor_rollout_ref.rollout.checkpoint_engine.between_workers"
VALIDATION = "val-core/digit_sequence/acc/mean@1"


@pytest.fixture(scope="module")
def nodes(forked_ray_workers):
    """Two Ray nodes on this machine, two CPUs each; runs find them connected and leave them open."""
    for name, value in {**SETTINGS, "RAY_AUTH_MODE": "disabled"}.items():
        os.environ.setdefault(name, value)
    node = {"num_cpus": 2, "object_store_memory": 150 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def run(world: World, where: Path, kind: str, *overrides: str) -> list[dict]:
    preset, *own = KINDS[kind]
    words = rl_command(world, where, preset, f"data.val_files={world.val}", *own, "trainer.test_freq=3", *overrides)
    config = load_config(
        RLConfig, [*words[2:], "trainer.total_training_steps=5", "trainer.watchdog_seconds=0"], preset=preset
    )
    assert train(config) == 0
    return metrics(where)


@pytest.fixture(scope="module")
def local(world: World, tmp_path_factory: pytest.TempPathFactory):
    """Metrics of the runs in one process."""
    found: dict[str, list[dict]] = {}

    def of(kind: str) -> list[dict]:
        if kind not in found:
            found[kind] = run(world, tmp_path_factory.mktemp(kind) / "run", kind)
            assert [row["step"] for row in found[kind]] == list(range(6))
        return found[kind]

    return of


def without_canary(rows: list[dict]) -> list[dict]:
    gaps = [row.pop(COPIED) for row in rows if row["step"]]
    assert max(gaps) < 1e-5, "engines and trainer agree after every publication"
    return rows


def assert_close(rows: list[dict], expected: list[dict], tolerance: float) -> None:
    assert [sorted(row) for row in rows] == [sorted(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        far = {n: (row[n], v) for n, v in other.items() if abs(row[n] - v) > tolerance * max(1.0, abs(v))}
        assert not far, f"step {row['step']}"


@pytest.mark.long(*CORE)
def test_one_worker_gives_the_same_numbers(nodes, world, local, tmp_path):
    assert run(world, tmp_path / "run", "grpo", "trainer.runtime=ray") == local("grpo")


def test_critic_and_reference_apart_give_the_same_numbers(nodes, world, local, tmp_path):
    apart = ("critic.enable_resource_pool=true", "actor_rollout_ref.ref.enable_resource_pool=true")
    assert run(world, tmp_path / "run", "ppo", "trainer.runtime=ray", *apart) == local("ppo")


@pytest.mark.parametrize("way", ["object_store", "broadcast"])
def test_rollout_apart_gets_the_weights(nodes, world, local, tmp_path, way, caplog):
    apart = ("actor_rollout_ref.rollout.enable_resource_pool=true", f"{WAY}={way}")
    with caplog.at_level(logging.INFO, "hone"):
        found = without_canary(run(world, tmp_path / "run", "grpo", "trainer.runtime=ray", *apart))
    assert found == local("grpo")
    assert f"by way of {way}" in caplog.text and "the broadcast of weights failed" not in caplog.text


def test_rollout_apart_gets_weights_in_bfloat16(nodes, world, tmp_path):
    """Its matrices are those that the trainer computes with; only its embedding is rounded as the trainer's is not."""
    words = ("actor_rollout_ref.rollout.enable_resource_pool=true", "actor_rollout_ref.actor.dtype=bfloat16")
    rows = run(world, tmp_path / "run", "grpo", "trainer.runtime=ray", *words)
    gaps = [row[COPIED] for row in rows if row["step"]]
    assert len(gaps) == 5 and 0 < max(gaps) < 0.1


@pytest.mark.parametrize(("partial", "way"), [(False, "broadcast"), (True, "object_store")])
def test_two_rollout_workers_generate_during_training(nodes, world, tmp_path, partial, way):
    """A pool of two workers for generation, and one of a worker for training."""
    apart = "actor_rollout_ref.rollout={enable_resource_pool: true, nnodes: 1, n_gpus_per_node: 2}"
    keys = (f"{WAY}={way}", "trainer.async.max_staleness=1", f"trainer.async.partial_rollouts={str(partial).lower()}")
    rows = run(world, tmp_path / "run", "grpo", "trainer.runtime=ray", apart, *keys, "trainer.rollout_dump_freq=1")
    assert [row["training/staleness"] for row in rows if row["step"]] == [0, 1, 1, 1, 1]
    for step in range(1, 6):
        oldest = max(0, step - 2)
        found = {weight_versions(record) for record in records(tmp_path / "run", step)}
        assert found == {(oldest, oldest)} if not partial else {low for low, _ in found} <= {oldest, step - 1}
    assert {row["coverage/trained"] for row in rows if row["step"]} == {12.0 * step for step in range(1, 6)}
    assert [row["step"] for row in rows if VALIDATION in row] == [0, 3, 5]
    for step in (0, 3, 5):
        answers = records(tmp_path / "run", step, "validation")
        assert [weight_versions(answer) for answer in answers] == [(step, step)] * 4


def test_a_batch_streams_into_one_update(nodes, world, local, tmp_path):
    apart = "actor_rollout_ref.rollout.enable_resource_pool=true"
    rows = run(world, tmp_path / "run", "once", "trainer.runtime=ray", apart, "trainer.async.stream=true")
    for row, other in zip(rows, local("once"), strict=True):
        for name in ("actor/grad_norm", "critic/score/mean", "actor/entropy") if row["step"] else ():
            assert row[name] == pytest.approx(other[name], rel=1e-4), (row["step"], name)


def test_rollout_apart_gets_merged_adapters(nodes, world, local, tmp_path):
    apart = "actor_rollout_ref.rollout.enable_resource_pool=true"
    found = without_canary(run(world, tmp_path / "run", "lora", "trainer.runtime=ray", apart))
    assert_close(found, local("lora"), 1e-4)


@pytest.mark.parametrize("kind", ["grpo", "once", "clip_cov"])
def test_two_workers_on_two_nodes_train_as_one(nodes, world, local, tmp_path, kind):
    found = run(world, tmp_path / "run", kind, "trainer.runtime=ray", "trainer.nnodes=2", "trainer.save_freq=5")
    balance = [row.pop(name) for row in found for name in [n for n in row if n.startswith("global_seqlen/")]]
    assert balance, "the balance of the ranks is logged"
    assert_close(without_canary(found), local(kind), 1e-5)
    assert (tmp_path / "run/checkpoints/step_5/actor/config.json").is_file()


@pytest.mark.parametrize("size", ["context_parallel_size", "pipeline_model_parallel_size"])
def test_two_workers_that_share_tokens_or_layers_train_as_one(nodes, world, local, tmp_path, size):
    divided = ("trainer.n_gpus_per_node=2", f"actor_rollout_ref.actor.{size}=2", "trainer.save_freq=5")
    found = run(world, tmp_path / "run", "grpo", "trainer.runtime=ray", *divided)
    assert_close(without_canary(found), local("grpo"), 1e-5)
    assert (tmp_path / "run/checkpoints/step_5/actor/config.json").is_file()


def test_episodes_of_several_turns_are_played_by_two_workers_as_by_one(nodes, world, tmp_path):
    """Rows of an environment and rows of a tool agent, in one batch; a random model, whose turns mean nothing."""
    rows = []
    for number in range(6):
        game = {"name": "guess_the_number", "seed": number, "options": {"max_number": 8, "guesses": 2}}
        told, asked = "I think of a number from 1 to 8.", f"What is {number}*7?"
        loop = ("environment", "guess", told, {"environment": game})
        loop = loop if number % 2 else ("support.calling_loop:Calls", "exact", asked, {"x": 1})
        rows.append({"agent_name": loop[0], "data_source": loop[1], "prompt": [{"role": "user", "content": loop[2]}],
                     "extra_info": loop[3], "reward_model": {"style": "rule", "ground_truth": str(number)}})  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]\n")
    for number, words in enumerate(
        [
            ("data", "tokenizer", "--files", world.conversations, "--out", tmp_path / "tokenizer", "--vocab-size", 300,
             "--template", "chatml_tools"),
            ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", tmp_path / "tokenizer", "--out", tmp_path / "model"),
        ]
    ):  # fmt: skip
        ended = hone(*words, log=tmp_path / f"make{number}.log")
        assert ended.code == 0, ended.output
    episodes = "actor_rollout_ref.rollout.multi_turn"
    found = {}
    for runtime, nnodes in (("local", 1), ("ray", 2)):
        words = rl_command(world, tmp_path / runtime, "grpo", f"trainer.runtime={runtime}", f"trainer.nnodes={nnodes}")
        overrides = [
            *(f"actor_rollout_ref.model.path={tmp_path}/model", f"data.train_files={tmp_path}/rows.jsonl"),
            *(
                "data.train_batch_size=6",
                "actor_rollout_ref.actor.ppo_mini_batch_size=6",
                "actor_rollout_ref.rollout.n=2",
            ),
            *("data.max_prompt_length=320", "data.max_response_length=80", f"{episodes}.enable=true"),
            *(f"{episodes}.max_assistant_turns=2", f"{episodes}.max_tokens_per_turn=8"),
            *(f"{episodes}.tool_config_path={tmp_path}/tools.yaml", "trainer.total_training_steps=2"),
            *("trainer.watchdog_seconds=0", "trainer.val_before_train=false", "preflight.allow=[R47]"),
        ]
        assert train(load_config(RLConfig, [*words[2:], *overrides], preset="grpo")) == 0
        found[runtime] = metrics(tmp_path / runtime)
    for row in found["ray"]:
        for name in [name for name in row if name.startswith("global_seqlen/") or name == COPIED]:
            del row[name]
    for row in found["local"]:
        row.pop(COPIED, None)
        assert row["tool/success_rate"] == 1 and row["num_turns/max"] >= 3 and row["episode/fact/guesses"] > 0
    assert_close(found["ray"], found["local"], 1e-5)
    assert (tmp_path / "ray/rollouts/step_1.txt").read_text().count("ended: ") >= 4


def test_objects_of_the_driver_reach_the_workers(world: World, nodes: Cluster, tmp_path: Path) -> None:
    where = tools_model(world, tmp_path)
    shape = {"max_prompt_length": 500, "max_response_length": 48, "train_batch_size": 4, "n": 2, "num_threads": 1}
    limits = {"max_assistant_turns": 4, "max_tokens_per_turn": 8, "max_tool_response_length": 16}
    rows = [{"prompt": [{"role": "user", "content": f"double {number}"}]} for number in range(4)]
    seen: list[dict] = []

    def train_on(runtime: str, **given: object) -> list[dict]:
        name = f"{runtime}_{'_'.join(given)}"
        run = api_train(str(where), steps=2, out=tmp_path / name, runtime=runtime, **shape, **limits, **given)
        return [{key: value for key, value in row.items() if key.startswith("critic/")} for row in run.metrics]

    called = {"dataset": rows, "tools": [double], "agent_loop": AlwaysCalls, "reward": tool_answered}
    assert train_on("ray", **called, on_sample=seen.append) == train_on("local", **called)
    assert [sample["step"] for sample in seen] == [1] * 8 + [2] * 8
    assert {sample["terms"]["answered"] for sample in seen} == {1.0}
    played = {"dataset": range(4), "environment": Echo}
    assert train_on("ray", **played) == train_on("local", **played)
