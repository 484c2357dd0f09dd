"""A checkout that is not installed, on a machine without jsonschema: programs run from the folder alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.patience import LONG
from support.world import World, rl_command, sft_command, steps_saved

ROOT = Path(__file__).resolve().parents[2]

BARE = """
import importlib.metadata as metadata, sys
sys.modules["jsonschema"] = None
original = metadata.distribution
def distribution(name):
    if name == "hone-rl":
        raise metadata.PackageNotFoundError(name)
    return original(name)
metadata.distribution = distribution
from hone.cli.main import main
main()
"""


@pytest.mark.parametrize(
    "program",
    [
        pytest.param("grpo", marks=pytest.mark.application("hone/cli", "hone/__init__.py", "pyproject.toml")),
        pytest.param("sft", marks=pytest.mark.long("hone/cli", "hone/trainers/sft.py")),
    ],
)
def test_programs_train_from_a_checkout(world: World, tmp_path: Path, program: str) -> None:
    steps = "trainer.total_training_steps=1"
    command = sft_command(world, tmp_path / "run", steps)
    if program == "grpo":
        command = rl_command(
            world,
            tmp_path / "run",
            program,
            steps,
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            "data.train_batch_size=4",
        )
    ended = subprocess.run(
        [sys.executable, "-c", BARE, *map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=LONG
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert steps_saved(tmp_path / "run") == [1]
