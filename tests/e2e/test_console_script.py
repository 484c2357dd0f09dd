"""The installed `hone`, started cold as a shell starts it; elsewhere in the tests commands are forks of a warm process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.launch import hone
from support.patience import LONG
from support.world import World, metrics, rl_command, run_record, sft_command, steps_saved

HONE = Path(sys.executable).parent / "hone"


def cold(*words: object, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the console script to its end."""
    return subprocess.run([HONE, *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=LONG)


@pytest.mark.slow
def test_help(tmp_path: Path) -> None:
    ended = cold("--help", folder=tmp_path)
    assert ended.returncode == 0 and "train" in ended.stdout and ended.stderr == ""


@pytest.mark.slow
def test_sft(world: World, tmp_path: Path) -> None:
    ended = cold(*sft_command(world, tmp_path / "run", "trainer.total_training_steps=2"), folder=tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert steps_saved(tmp_path / "run") == [2]


@pytest.mark.long("hone/cli", "hone/startup.py")
def test_a_run_is_killed_resumed_and_measured(world: World, tmp_path: Path) -> None:
    steps = ("trainer.total_training_steps=6", "trainer.save_freq=1", "data.train_batch_size=6")
    whole, run = (rl_command(world, tmp_path / name, "grpo", *steps) for name in ("whole", "run"))
    assert hone(*whole, log=tmp_path / "log").code == 0

    with (tmp_path / "killed.log").open("w") as log:
        killed = subprocess.Popen([HONE, *run], cwd=tmp_path, stdout=log, stderr=log)
        while killed.poll() is None and not (tmp_path / "run/checkpoints/step_2").exists():
            time.sleep(0.01)
        killed.kill()
    assert killed.wait() == -signal.SIGKILL, (tmp_path / "killed.log").read_text()

    resumed = cold(*run, folder=tmp_path)
    assert resumed.returncode == 0 and run_record(tmp_path / "run")["status"] == "finished", resumed.stderr
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")

    lengths = ("--max-prompt-length", 32, "--max-response-length", 8)
    measured = cold("eval", tmp_path / "run", "--data", world.val, *lengths, "--json", folder=tmp_path)
    assert measured.returncode == 0 and '"val-aux/digit_sequence/reward/mean@1"' in measured.stdout, measured.stderr
