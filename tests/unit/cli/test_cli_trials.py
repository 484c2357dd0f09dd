"""Trials in processes of their own: an interrupt reaches the run, which saves first."""

import os
import signal
import sys
import threading
import time

import pytest
from support.patience import SOON

from hone.cli.trials import LOG, Trial, file_words, run_trial, settings_of

SAVES = """#!/bin/sh
trap 'echo saved; exit 130' INT
trap 'echo saved; exit 143' TERM
echo ready
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_first(number, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text(SAVES)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    trial = Trial(("train",), tmp_path / "run")

    def interrupt():
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            if (trial.directory / LOG).exists() and "ready" in (trial.directory / LOG).read_text():
                os.kill(os.getpid(), number)
                return
            time.sleep(0.01)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        run_trial(trial)
    thread.join()
    assert (trial.directory / LOG).read_text().split() == ["ready", "saved"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_words_of_a_trial(tmp_path):
    assert settings_of("sft", tmp_path, {"trainer.seed": 3}) == [
        f"trainer.default_local_dir='{tmp_path}'",
        "trainer.resume_mode='auto'",
        "trainer.seed=3",
    ]
    assert any(word.startswith("trainer.log_val_generations=") for word in settings_of("train", tmp_path, {}))
    assert file_words(tmp_path / "a.yaml", "grpo", ["x=1"]) == [
        *("--config-path", str(tmp_path), "--config-name", "a.yaml", "--preset", "grpo", "x=1")
    ]
