"""Suites of other packages by `hone eval` and during training, with a stand-in for the package; tests/ecosystem has the real ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import Ended
from support.suite_stand_in import VERSION, expected_score, stand_in
from support.world import World, metrics, rl_command

pytestmark = pytest.mark.application("hone/agents/suites.py", "hone/trainers", "hone/cluster/rollout.py")
SCORE = "val-suite/lm-eval/mine/acc"
Run = Callable[..., Ended]


def test_a_model_is_evaluated_by_name(world: World, run: Run, tmp_path: Path) -> None:
    words = ["eval", world.model, "--suite", "lm-eval:mine --num_fewshot 2", "--suite-python", stand_in(tmp_path)]
    ended = run(*words, "--max-samples", 3, "--output", "scores", "--json")
    assert ended.code == 0, ended.output
    told = json.loads(ended.output[ended.output.index("{") : ended.output.rindex("}") + 1])
    assert told == {
        SCORE: pytest.approx(expected_score(world.model), abs=1e-4),
        "val-suite/lm-eval/mine/exact_match/strict-match": 0.5,
        "val-suite/lm-eval/mine/samples": 3,
        "val-suite/lm-eval/version": VERSION,
    }
    (score,) = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert (score["task"], score["task_version"], score["version"], score["samples"]) == ("mine", "1.0", VERSION, 3)
    assert len(list((tmp_path / "scores").glob("lm-eval-*/policy/results_*.json"))) == 1
    (call,) = map(json.loads, (tmp_path / "calls").read_text().splitlines())
    assert call[-2:] == ["--num_fewshot", "2"] and call[call.index("--limit") + 1] == "3"


def test_a_suite_that_fails_has_no_score(world: World, run: Run, tmp_path: Path) -> None:
    words = ["eval", world.model, "--suite", "lm-eval:mine", "--suite-python", stand_in(tmp_path, [1])]
    ended = run(*words, "--output", "scores")
    assert ended.code == 2 and "E-suite" in ended.output and "cannot be downloaded" in ended.output
    assert not (tmp_path / "scores" / "scores.json").exists()


def training(world: World, folder: Path, *, fails: list[int]) -> list[str]:
    python = f"trainer.suite_python={{lm-eval: {stand_in(folder, fails)}}}"
    steps = ("trainer.total_training_steps=2", "trainer.test_freq=1", "trainer.save_freq=1", "preflight.reward_rows=0")
    suites = (
        "trainer.val_suites=[lm-eval:mine]",
        "data.val_max_samples=3",
        python,
        "actor_rollout_ref.actor.optim.lr=1e-2",
    )
    return rl_command(world, folder / "run", "grpo", *steps, *suites)


@pytest.mark.slow
def test_scores_in_training_are_of_the_weights_of_their_step(world: World, run: Run, tmp_path: Path) -> None:
    ended = run(*training(world, tmp_path, fails=[2]))
    assert ended.code == 0, ended.output
    before, failed, after = metrics(tmp_path / "run")
    assert before[SCORE] == pytest.approx(expected_score(world.model), abs=1e-4)
    assert (before["val-suite/lm-eval/mine/samples"], before["val-suite/failed"]) == (3, 0)
    assert SCORE not in failed and failed["val-suite/failed"] == 1 and "E-suite" in ended.output
    trained = expected_score(tmp_path / "run" / "checkpoints" / "step_2" / "actor")
    assert after[SCORE] == pytest.approx(trained, abs=1e-4) and abs(after[SCORE] - before[SCORE]) > 1e-3
    written = [json.loads((tmp_path / f"run/suites/step_{step}/scores.json").read_text()) for step in range(3)]
    assert [[score["version"] for score in scores] for scores in written] == [[VERSION], [], [VERSION]]


@pytest.mark.slow
def test_a_suite_that_never_worked_ends_the_run(world: World, run: Run, tmp_path: Path) -> None:
    ended = run(*training(world, tmp_path, fails=[1]))
    assert ended.code == 2 and "E-suite" in ended.output
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
