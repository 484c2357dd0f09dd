"""A run whose order of prompts follows its own pass rates: resumed, it goes on as if it had never stopped."""

import json

import pytest
from support.world import metrics, rl_command

pytestmark = pytest.mark.slow


def asked(run):
    """Uids of the prompts of every step, from the rollouts written."""
    return [
        [json.loads(line)["uid"] for line in file.read_text().splitlines()]
        for file in sorted((run / "rollouts").glob("*.jsonl"))
    ]


def test_a_curriculum_by_pass_rate_resumes_exactly(world, run, tmp_path):
    overrides = (
        "data.sampler.name=pass_rate", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "trainer.rollout_dump_freq=1",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 4), (parts, 2), (parts, 4)):
        ended = run(*rl_command(world, directory, "grpo", *overrides, f"trainer.total_training_steps={steps}"))
        assert ended.code == 0, ended.output
    assert metrics(parts) == metrics(whole)
    assert asked(parts) == asked(whole) and len(asked(whole)) == 4
    assert len({tuple(uids) for uids in asked(whole)}) > 1, "not the same prompts in every step"
