"""A run on two processes goes on from its checkpoint on one, as if nothing had happened."""

import functools
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from support.launch import Command, hone, set_environment
from support.world import World, metrics, rl_command, steps_saved

pytestmark = pytest.mark.long("hone/training/checkpoints")

TWO = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2")


def command(world: World, run, steps: int, *layout: str) -> list[str]:
    rates = ("actor_rollout_ref.actor.optim.lr=1e-3", "critic.optim.lr=1e-3")
    ends = (f"trainer.total_training_steps={steps}", "trainer.save_freq=2", "trainer.test_freq=0")
    return rl_command(world, run, "ppo", *rates, *ends, "data.train_batch_size=6", *layout)


def start_on_two(world: World, folder: Path, workers: Any, *layout: str) -> Path:
    """Run two steps on two processes; returns the run's directory."""
    parts = folder / "parts"
    prepare = functools.partial(set_environment, workers)
    first = Command(command(world, parts, 2, *TWO, *layout), folder / "log1", prepare=prepare).wait()
    assert first.code == 0, first.output
    return parts


def test_a_run_changes_its_layout(forked_ray_workers, world: World, tmp_path):
    parts = start_on_two(world, tmp_path, forked_ray_workers)
    for model in ("actor", "critic"):
        held = [set(load_file(file)) for file in parts.glob(f"checkpoints/step_2/{model}_optimizer/rank_*.safetensors")]
        assert len(held) == 2
        assert held[0] & held[1], "each rank wrote a piece of the same tensors"
    goes_on_in_one_process(world, tmp_path, parts)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_run_changes_its_backend(forked_ray_workers, world: World, tmp_path, stages: int):
    """Two steps with Megatron-core, policy and critic each in that number of stages; then two in one process without it."""
    actor = "actor_rollout_ref.actor"
    layout = (f"{actor}.strategy=megatron", f"{actor}.pipeline_model_parallel_size={stages}")
    goes_on_in_one_process(world, tmp_path, start_on_two(world, tmp_path, forked_ray_workers, *layout))


def goes_on_in_one_process(world: World, folder: Path, parts: Path) -> None:
    """Resume the run in one process; its metrics are those of a run in one process from the first step on."""
    whole = folder / "whole"
    assert hone(*command(world, whole, 4), log=folder / "log").code == 0
    second = hone(*command(world, parts, 4), log=folder / "log2")
    assert second.code == 0, second.output
    assert steps_saved(parts) == [2, 4]
    for name in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/score/mean"):
        found = [row[name] for row in metrics(parts) if name in row]
        expected = [row[name] for row in metrics(whole) if name in row]
        assert len(expected) == 4
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-5), name
