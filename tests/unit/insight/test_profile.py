"""`hone profile`: times by stage, advice with its bound, shares of processes, before and after."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises
from typer.testing import CliRunner

from hone.apps.lab.compare import Run
from hone.apps.lab.profile import covered, process_shares, profile_run
from hone.cli.main import app
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory
from hone.insight.timeline import DoneSpan, ProcessTimeline, Recorder

ACTOR = "actor_rollout_ref.actor."
GPU = {"hardware": {"gpus": [{"name": "a"}]}}


def run_of(*rows: Mapping[str, float], record=None, **config: object) -> Run:
    steps = [{"step": step, **{f"timing_s/{k}": v for k, v in row.items()}} for step, row in enumerate(rows, start=1)]
    keys = {key.replace("__", "."): value for key, value in config.items()}
    return Run("run", Path("run"), record or {}, steps, keys)


def codes(run: Run) -> dict[str, float]:
    return {advice.code: round(advice.speedup, 3) for advice in profile_run(run).advice}


def test_stages_are_means_without_the_first_step_and_sum_to_the_time_of_a_step():
    run = run_of(
        {"step": 50, "gen": 49}, {"step": 4, "gen": 2, "adv": 1}, {"step": 6, "gen": 3, "adv": 1, "testing": 2}
    )
    profile = profile_run(run)
    assert (profile.first, profile.last, profile.steps) == (2, 3, 2)
    assert profile.stages == {"gen": 2.5, "other": 1.5, "adv": 1.0, "testing": 1.0}
    assert profile.seconds == 6.0 and profile.share("gen") == 2.5 / 6 and profile.share("ref") == 0
    assert profile_run(run, 1).stages == {"gen": 3, "testing": 2, "other": 2, "adv": 1}
    assert profile_run(run_of({"step": 50, "gen": 49})).steps == 1


def test_supervised_steps_include_their_validation():
    profile = profile_run(run_of({"step": 9, "update_actor": 9}, {"step": 5, "update_actor": 3, "testing": 2}))
    assert profile.seconds == 5 and profile.stages == {"update_actor": 3, "testing": 2, "other": 0}


def test_validation_during_training_is_outside_of_the_sum():
    row = {"step": 4.0, "gen": 3.0, "testing": 9.0}
    config = {"trainer__async_training__max_staleness": 1}
    profile = profile_run(run_of(row, row, **config))
    assert profile.seconds == 4 and profile.concurrent == {"testing": 9}
    assert profile_run(run_of(row, row, **config, trainer__async_training__validation_share=0)).seconds == 13


def test_parts_of_the_weight_sync_are_not_stages():
    row = {"step": 10.0, "gen": 4.0, "update_weights": 6.0, "update_weights_drain": 5.0, "update_weights_transfer": 1.0}
    profile = profile_run(run_of(row, row, trainer__async_training__max_staleness=1))
    assert profile.parts == {"drain": 5, "transfer": 1} and profile.seconds == 10
    assert {a.code: round(a.speedup, 3) for a in profile.advice} == {
        "weights-drain": 2.0,
        "gen-engines": 1.667,
        "weights-buckets": 1.111,
    }


@pytest.mark.parametrize(
    ("row", "config", "expected"),
    [
        # generation 6 of 10 s: the engines' half is 3 s; taking turns costs the shorter side, 4 s
        ({"gen": 6, "update_actor": 4}, {}, {"gen-async": 1.667, "gen-engines": 1.429}),
        ({"gen": 6, "update_actor": 4}, {"trainer.async_training.max_staleness": 2}, {"gen-engines": 2.5}),
        ({"reward": 10}, {"reward.num_workers": 3}, {"reward-workers": 2.0}),
        ({"update_actor": 5, "old_log_prob": 5}, {f"{ACTOR}recompute_old_log_probs": True}, {"old-log-prob-pass": 2.0}),
        (
            {"update_actor": 5, "old_log_prob": 5},
            {f"{ACTOR}ppo_mini_batch_size": 4, "data.train_batch_size": 4},
            {},
        ),
        (
            {"update_actor": 5, "old_log_prob": 5},
            {f"{ACTOR}ppo_mini_batch_size": 2, "data.train_batch_size": 4},
            {"old-log-prob-pass": 2.0},
        ),
        ({"ref": 2, "update_actor": 8}, {}, {"ref-kl": 1.25}),
        (
            {"update_actor": 10},
            {"model.enable_gradient_checkpointing": True, "model.compile_layers": "never", "data.max_token_len_per_gpu": 8},
            {"update-budget": 2.0, "update-compile": 2.0, "update-checkpointing": 1.333},
        ),
        ({"update_actor": 6, "save_checkpoint": 4}, {"trainer.save_freq": 1}, {"save-less": 1.25}),
        ({"update_actor": 6, "save_checkpoint": 4}, {"trainer.save_freq": 1, "trainer.async_save": False}, {"save-async": 1.667}),
        ({"update_actor": 6, "testing": 4}, {"trainer.test_freq": 5}, {"validate-less": 1.25}),
        ({"update_actor": 6}, {"trainer.rollout_dump_freq": 5}, {"other-dumps": 1.25}),
        ({"update_actor": 9.9, "ref": 0.1}, {}, {}),
    ],
)  # fmt: skip
def test_advice_and_its_bound(row, config, expected):
    between = row.get("save_checkpoint", 0)
    full = {"step": 10 - between, **row}
    run = run_of(full, full, record=GPU, **{key.replace(".", "__"): value for key, value in config.items()})
    assert codes(run) == expected
    assert list(profile_run(run).advice) == sorted(profile_run(run).advice, key=lambda a: (-a.speedup, a.code))


def test_advice_names_the_next_value_of_the_key():
    row = {"step": 10, "reward": 5, "update_actor": 5}
    run = run_of(row, row, record=GPU, reward__num_workers=3, data__max_token_len_per_gpu=512)
    changes = {advice.code: advice.change for advice in profile_run(run).advice}
    assert changes["reward-workers"] == "reward.num_workers=6"
    assert changes["update-budget"].startswith("data.max_token_len_per_gpu=1024")
    assert set(codes(run_of(row, row, data__max_token_len_per_gpu=512))) == {"reward-workers"}  # no GPU


def test_a_run_without_steps_has_no_profile():
    with raises(HoneError, "train at least one step", code="E-profile"):
        profile_run(run_of())


def test_shares_of_processes_within_the_measured_steps():
    driver = [
        DoneSpan("step 1", 0, 10, 0, False),
        DoneSpan("step 2", 10, 20, 0, False),
        DoneSpan("gen", 10, 15, 0, False),
    ]
    driver = [*driver, DoneSpan("groups", 12, 15, 0, True)]
    actor = [DoneSpan("update", 5, 12, 1, False), DoneSpan("save", 11, 13, 2, False), DoneSpan("pool", 19, 30, 1, True)]
    timelines = [ProcessTimeline("driver", None, 1, "a", driver), ProcessTimeline("actor", 0, 2, "a", actor)]
    first, second = process_shares(timelines, 2, 2)
    assert (first.name, first.work, first.wait, first.idle, first.longest_wait) == ("driver", 0.7, 0.3, 0, "groups")
    assert (second.name, second.wait, second.longest_wait) == ("actor[0]", 0.1, "pool")
    assert second.work == pytest.approx(0.3) and second.idle == pytest.approx(0.6)
    assert process_shares(timelines, 3, 4) == []


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=20))
def test_covered_time_against_a_count_of_seconds(pairs):
    spans = sorted(DoneSpan("a", begin, begin + length, 0, False) for begin, length in pairs)
    spans.sort(key=lambda span: (span.begin, -span.end))
    assert covered(spans) == len({second for span in spans for second in range(int(span.begin), int(span.end))})


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["profile", *map(str, arguments)], env={"COLUMNS": "140"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, reward in (("slow", 5.0), ("fast", 1.0)):
        run = RunDirectory(tmp_path / name)
        run.start(seed=1, config_yaml="reward: {num_workers: 4}\n", command=["hone", "train"])
        for step in range(1, 4):
            run.log_metrics(step, {"timing_s/step": 5 + reward, "timing_s/gen": 5.0, "timing_s/reward": reward})
        run.close()
    (tmp_path / "slow/timeline").mkdir()
    process = {"role": "driver", "rank": None, "pid": 7, "host": "here"}
    recorder = Recorder(tmp_path / "slow/timeline/driver.7.jsonl", process)
    for step in range(1, 4):
        recorder.add(f"step {step}", 1.0 * step, 0, False)
    recorder.write()
    return tmp_path


def test_command_before_and_after(root: Path, tmp_path: Path):
    after = json.loads(invoke("fast", "--root", root, "--against", "slow", "--json"))
    assert (after["seconds"], after["against"]["seconds"]) == (6.0, 10.0)
    assert after["shares"] == {"gen": 5 / 6, "reward": 1 / 6, "other": 0}
    lines = [line.split() for line in invoke("fast", "--root", root, "--against", "slow").splitlines()]
    assert ["reward", "5", "1", "-4"] in lines and ["step", "10", "6", "-4"] in lines


def test_command_with_a_trace(root: Path, tmp_path: Path):
    out = invoke("slow", "--root", root, "--trace", tmp_path / "trace.json")
    assert "reward.num_workers=8" in out and ["driver", "100%", "0%", "0%"] in [
        line.split() for line in out.splitlines()
    ]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["step 1", "step 2", "step 3"]
    with raises(HoneError, "trainer.timeline=true", code="E-profile"):
        invoke("fast", "--root", root, "--trace", tmp_path / "other.json")
