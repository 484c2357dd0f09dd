"""`hone profile` on runs of a tiny model: times, processes, and a trace whose spans nest."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import offline_words, rl_words

from hone.insight.metrics import is_timing
from hone.insight.run_files import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/insight", "hone/apps/lab", "hone/cli/profile.py")]


def train(root: Path, name: str, *words: str) -> Path:
    ended = hone(
        *rl_words(root, root / name, "trainer.total_training_steps=3", *words), log=root / f"{name}.log", cwd=root
    )
    assert ended.code == 0, ended.output
    return root / name


def numbers(run: Path) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if not is_timing(name)} for row in read_metrics(run)]


@pytest.mark.parametrize("stream", [False, True])
def test_profiled_steps_compute_the_same_numbers(tiny: Path, stream: bool):
    name = f"stream_{stream}"
    words = ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "algorithm.adv_estimator=grpo")
    words += (f"trainer.async_training.stream={stream}",)
    run = train(tiny, name, *words, "trainer.profile_steps=[2]")
    if not stream:  # parts of a streamed update depend on the order in which groups finish
        assert numbers(run) == numbers(train(tiny, f"plain_{name}", *words))
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["step_2.actor-0.json.gz", "step_2.actor-0.txt"]
    with gzip.open(run / "profile/step_2.actor-0.json.gz", "rt") as file:
        names = {event.get("name") for event in json.load(file)["traceEvents"]}
    assert "aten::mm" in names and any("Backward" in str(name) for name in names)
    assert "aten::mm" in (run / "profile/step_2.actor-0.txt").read_text()


def test_profiled_supervised_step(tiny: Path):
    run = tiny / "sft"
    ended = hone(*offline_words("sft", tiny, run, "trainer.profile_steps=[1,2]"), log=tiny / "sft.log", cwd=tiny)
    assert ended.code == 0, ended.output
    names = [f"step_{step}.actor-0.{end}" for step in (1, 2) for end in ("json.gz", "txt")]
    assert sorted(path.name for path in (run / "profile").iterdir()) == names


def test_a_run_has_a_profile_and_a_trace(tiny: Path):
    run = train(tiny, "run")
    before = train(tiny, "before", "trainer.timeline=false")
    assert not (before / "timeline").exists()
    trace = tiny / "trace.json"
    ended = hone("profile", run, "--against", before, "--trace", trace, "--json", log=tiny / "profile.log", cwd=tiny)
    assert ended.code == 0, ended.output
    profile = json.loads(ended.output)
    rows = read_metrics(run)
    steps = [row for row in rows if row["step"] > 1]
    for row in steps:
        assert 0 < row["perf/idle/actor"] < 1
    assert (profile["first"], profile["last"], profile["steps"]) == (2, 3, 2)
    generation = sum(row["timing_s/gen"] for row in steps) / 2
    assert profile["stages"]["gen"] == pytest.approx(generation)
    assert sum(profile["shares"].values()) == pytest.approx(1) and profile["against"]["steps"] == 2
    (driver,) = [process for process in profile["processes"] if process["name"] == "driver"]
    assert driver["idle"] < 0.2 and driver["work"] + driver["wait"] + driver["idle"] == pytest.approx(1)
    events = json.loads(trace.read_text())["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "i"] == ["step 1", "step 2", "step 3"]
    spans = [event for event in events if event["ph"] == "X"]
    names = {event["name"] for event in spans}
    assert {"gen", "reward", "adv", "update_actor", "update_weights"} <= names
    first = next(event for event in spans if event["name"] == "step 1")
    update = next(event for event in spans if event["name"] == "update_actor")
    assert first["ts"] <= update["ts"] and update["ts"] + update["dur"] <= first["ts"] + first["dur"]
    assert any(event["name"].endswith("scores") and event["cat"] == "wait" for event in spans)
