"""A run on two processes goes on from its checkpoint on one, as if nothing had happened."""

import functools

import pytest
from safetensors.torch import load_file
from support.launch import Command, hone, set_environment
from support.world import World, metrics, rl_command, steps_saved

pytestmark = pytest.mark.long

TWO = ("trainer.runtime=ray", "trainer.n_gpus_per_node=2")


def command(world: World, run, steps: int, *layout: str) -> list[str]:
    rates = ("actor_rollout_ref.actor.optim.lr=1e-3", "critic.optim.lr=1e-3")
    ends = (f"trainer.total_training_steps={steps}", "trainer.save_freq=2", "trainer.test_freq=0")
    return rl_command(world, run, "ppo", *rates, *ends, "data.train_batch_size=6", *layout)


def test_a_run_changes_its_layout(forked_ray_workers, world: World, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert hone(*command(world, whole, 4), log=tmp_path / "log").code == 0
    prepare = functools.partial(set_environment, forked_ray_workers)
    first = Command(command(world, parts, 2, *TWO), tmp_path / "log1", prepare=prepare).wait()
    assert first.code == 0, first.output
    for model in ("actor", "critic"):
        held = [set(load_file(file)) for file in parts.glob(f"checkpoints/step_2/{model}_optimizer/rank_*.safetensors")]
        assert len(held) == 2
        assert held[0] & held[1], "each rank wrote a piece of the same tensors"
    second = hone(*command(world, parts, 4), log=tmp_path / "log2")
    assert second.code == 0, second.output
    assert steps_saved(parts) == [2, 4]
    for name in ("actor/loss", "actor/grad_norm", "critic/vf_loss", "critic/score/mean"):
        found = [row[name] for row in metrics(parts) if name in row]
        expected = [row[name] for row in metrics(whole) if name in row]
        assert len(expected) == 4
        assert found == pytest.approx(expected, rel=2e-4, abs=2e-5), name
