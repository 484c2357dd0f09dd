"""Validation during training, with a real engine process: its answers, its record, and a run that ends while it is under way."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support import forked_engines
from support.archives import records
from support.launch import Command, hone, kill
from support.world import PROMPT, RESPONSE, World, metrics, rl_command, run_record, steps_saved

from hone.insight.records import weight_versions

pytestmark = pytest.mark.application("hone/trainers", "hone/generation")

KEYS = (
    "trainer.async.max_staleness=1",
    "trainer.test_freq=2",
    "trainer.save_freq=2",
    "trainer.max_ckpt_to_keep=null",
    "trainer.total_training_steps=6",
    "preflight.reward_rows=0",
)
MEAN = "val-core/digit_sequence/reward/mean@1"
REWARD = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    # share of right digits; validation is slow while there is a file SLOW
    if ground_truth in {answers} and Path({slow!r}).exists():
        time.sleep(4)
    return sum(a == b for a, b in zip(solution_str, ground_truth)) / len(ground_truth)
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """The file that makes validation slow."""
    return tmp_path / "SLOW"


@pytest.fixture
def reward(world: World, slow: Path, tmp_path: Path) -> Path:
    rows = pq.read_table(world.val).to_pylist()
    answers = {row["reward_model"]["ground_truth"] for row in rows}
    path = tmp_path / "reward.py"
    path.write_text(REWARD.format(answers=answers, slow=str(slow)))
    return path


def words(world: World, run: Path, reward: Path, *overrides: str) -> list[str]:
    own = (f"data.val_files={world.val}", f"reward.custom_reward_function.path={reward}")
    return rl_command(world, run, "grpo", *KEYS, *own, *overrides)


def lines(run: Path) -> list[tuple[int, bool]]:
    """Step of every line of metrics.jsonl, and whether it is of a validation."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], MEAN in row) for row in rows]


@pytest.mark.parametrize("partial", ["true", pytest.param("false", marks=pytest.mark.long("hone/trainers"))])
def test_validation_equals_an_evaluation_of_its_checkpoint(
    world: World, reward: Path, tmp_path: Path, partial: str
) -> None:
    run, best = tmp_path / "run", f"trainer.best_ckpt_metric={MEAN}"
    command = words(world, run, reward, f"trainer.async.partial_rollouts={partial}", best)
    ended = hone(*command, log=tmp_path / "train.log", prepare=forked_engines.install)
    assert ended.code == 0, ended.output
    order = [(0, True), (1, False)]
    for step in (2, 4, 6):
        order += [(step, False), (step, True), (step + 1, False)]
    assert lines(run) == order[:-1], "before the line of the next step"
    reports = {row["step"]: row[MEAN] for row in metrics(run) if MEAN in row}
    for step in (2, 4, 6):
        answers = records(run, step, "validation")
        assert {weight_versions(answer) for answer in answers} == {(step, step)}
        limits = ("--max-prompt-length", PROMPT, "--max-response-length", RESPONSE)
        output, log = tmp_path / f"{step}.jsonl", tmp_path / f"{step}.log"
        model = run / f"checkpoints/step_{step}"
        ended = hone("eval", model, "--data", world.val, "--reward", reward, *limits, "--output", output, log=log)
        assert ended.code == 0, ended.output
        evaluated = [json.loads(line) for line in output.read_text().splitlines()]
        assert [answer["response_ids"] for answer in answers] == [answer["response_ids"] for answer in evaluated]
        mean = sum(answer["score"] for answer in evaluated) / len(evaluated)
        assert reports[step] == pytest.approx(mean)
    chosen = json.loads((run / "checkpoints/best.json").read_text())
    saved = {step: reports[step] for step in (2, 4, 6)}
    assert (chosen["step"], chosen["value"]) == max(saved.items(), key=lambda pair: (pair[1], -pair[0]))


def test_a_run_killed_during_validation_reports_it_after_the_resume(
    world: World, reward: Path, slow: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    slow.touch()
    command = words(world, run, reward, "trainer.val_before_train=false")
    killed = Command(command, log=tmp_path / "killed.log", prepare=forked_engines.install)
    assert killed.wait_until(lambda: (run / "checkpoints/step_2/checkpoint.json").exists())
    assert kill(killed) < 0
    assert (2, True) not in lines(run) and steps_saved(run) == [2]
    slow.unlink()
    ended = hone(*command, log=tmp_path / "resumed.log", prepare=forked_engines.install)
    assert ended.code == 0, ended.output
    assert lines(run) == [
        (1, False),
        *((step, again) for step in range(2, 7) for again in (False, True)[: 2 - step % 2]),
    ]
    again = hone(*command, log=tmp_path / "again.log", prepare=forked_engines.install)
    assert again.code == 0 and len(lines(run)) == 9, "a validation with a line is not repeated"


def test_a_stop_request_ends_the_validation_under_way_and_the_resume_makes_up_for_it(
    world: World, reward: Path, slow: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    slow.touch()
    command = words(world, run, reward, "trainer.val_before_train=false")
    stopped = Command(command, tmp_path / "stopped.log", prepare=forked_engines.install)
    assert stopped.wait_until(lambda: (run / "checkpoints/step_2/checkpoint.json").exists())
    stopped.signal(signal.SIGINT)
    assert stopped.wait().code == 128 + signal.SIGINT
    written = lines(run)
    assert written == [(step + 1, False) for step in range(len(written))]
    last = len(written)
    assert run_record(run)["status"] == "interrupted" and steps_saved(run)[-1] == last
    slow.unlink()
    ended = hone(*command, log=tmp_path / "resumed.log", prepare=forked_engines.install)
    assert ended.code == 0, ended.output
    validated = {step for step, again in lines(run) if again}
    assert validated == {last, 4, 6}, "the validation that was cut short has the weights of the step resumed from"
