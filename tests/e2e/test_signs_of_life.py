"""A run says what it does before its first step, and ends where and how it is asked to."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launch import Command, hone
from support.tiny_runs import make_tiny_runs, offline_words, rl_words

from hone.insight.run_files import read_metrics, read_run

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/progress.py", "hone/trainers", "hone/together.py")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_runs(tmp_path_factory.mktemp("tiny runs ü"))


def slow_validation() -> None:
    """Let every decode step, and every micro-batch, of a validation take a second."""
    from hone import progress
    from hone.insight import activity
    from hone.trainers.session import RunSession

    whole, quick = RunSession.cancelling, activity.tick

    @contextlib.contextmanager
    def cancelling(self: RunSession, what: str, total: int) -> Iterator[None]:
        activity.tick = lambda *_: time.sleep(1.0)
        with whole(self, what, total):
            yield
        activity.tick = quick

    RunSession.cancelling = cancelling  # type: ignore[method-assign]
    progress.Lines.__init__.__defaults__ = (0.2,)  # type: ignore[attr-defined]


def wait_for(command: Command, text: str) -> None:
    """Wait until a command has written a text."""
    log = command.log
    assert command.wait_until(lambda: log.exists() and text in log.read_text()), log.read_text()


def words(program: str, tiny: Path, run: Path, *more: str) -> list[str]:
    keys = ["trainer.logger=[console]", "trainer.val_before_train=true", "trainer.save_freq=-1", *more]
    if program == "train":
        rows = tiny / "prompts.jsonl"
        return rl_words(tiny, run, f"data.val_files='{rows}'", "data.max_response_length=40", *keys)
    rows = tiny / "conversations.jsonl"
    keys += ["data.max_length=64", "data.max_token_len_per_gpu=64"]
    return offline_words(program, tiny, run, f"data.val_files='{rows}'", *keys)


def quoted(words: list[str]) -> list[str]:
    """Return the words with quotes around paths, which have a space."""
    return [f"{key}='{value}'" if "/" in value and "'" not in value else f"{key}={value}" if value else key
            for key, _, value in (word.partition("=") for word in words)]  # fmt: skip


@pytest.mark.parametrize("program", ["train", "sft"])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_the_validation_before_the_first_step(program: str, times: int, tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = Command(quoted(words(program, tiny, run)), tmp_path / "log", tmp_path, prepare=slow_validation)
    wait_for(command, "validating: ")
    command.signal(signal.SIGINT)
    wait_for(command, "ending the validation")
    if times == 2:
        command.signal(signal.SIGINT)
    ended = command.wait()
    record = read_run(run)
    assert (record["status"], record["last_step"]) == ("interrupted", 0), record
    assert not read_metrics(run), "the validation went on to its end"
    assert ended.code in (130, -signal.SIGINT) and "Traceback" not in ended.output, ended.output
    assert "never retrieved" not in ended.output


def test_a_validation_that_was_cut_short_is_made_up_on_resume(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    keys = ("trainer.val_before_train=false", "trainer.test_freq=1")
    command = Command(quoted(words("train", tiny, run, *keys)), tmp_path / "log", tmp_path, prepare=slow_validation)
    wait_for(command, "validating: ")
    command.signal(signal.SIGINT)
    assert command.wait().code == 130
    assert [row["step"] for row in read_metrics(run)] == [1] and (run / "checkpoints" / "step_1").is_dir()
    resumed = hone(*quoted(words("train", tiny, run, *keys)), log=tmp_path / "resumed", cwd=tmp_path)
    assert resumed.code == 0, resumed.output
    validated = [row["step"] for row in read_metrics(run) if any(name.startswith("val-core/") for name in row)]
    assert validated == [1, 2]


def test_a_complete_run_says_so_and_names_what_had_no_effect(tiny: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = quoted(words("sft", tiny, run))
    first = hone(*command, log=tmp_path / "first", cwd=tmp_path)
    assert first.code == 0 and f"hone generate {run} " in first.output and f"hone view {run}" in first.output
    assert "trainer.total_training_steps=4 continues it" in first.output, first.output
    before = (run / "config.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes()
    again = hone(*command, "optim.lr=0.5", log=tmp_path / "again", cwd=tmp_path)
    assert again.code == 0, again.output
    assert "already complete at step 2; nothing was trained" in again.output
    assert "changed keys without effect: optim.lr: 0.001 -> 0.5" in again.output and "step 0/" not in again.output
    assert ((run / "config.yaml").read_bytes(), (run / "metrics.jsonl").read_bytes()) == before
    record = read_run(run)
    assert (record["status"], record["exit_reason"]) == ("finished", "all 2 steps done")
