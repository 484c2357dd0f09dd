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


CLASSES = """
import random

class Sums:
    def __len__(self):
        return 40

    def __getitem__(self, row):
        return {"prompt": f"{row}+1=", "data_source": "exact_match", "reward_model": {"ground_truth": str(row + 1)}}


class Order:
    def __init__(self, data_source, seed):
        self.size, self.draw = len(data_source), random.Random(seed)

    def __iter__(self):
        return iter(self.draw.sample(range(self.size), 10))
"""


def test_dataset_and_sampler_classes_of_the_user_resume_exactly(world, run, tmp_path):
    (tmp_path / "classes.py").write_text(CLASSES)
    overrides = (
        f"data.custom_cls.path={tmp_path}/classes.py", "data.custom_cls.name=Sums",
        f"data.sampler.class_path={tmp_path}/classes.py", "data.sampler.class_name=Order",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.rollout_dump_freq=1",
    )  # fmt: skip
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for directory, steps in ((whole, 4), (parts, 3), (parts, 4)):
        ended = run(*rl_command(world, directory, "grpo", *overrides, f"trainer.total_training_steps={steps}"))
        assert ended.code == 0, ended.output
    assert metrics(parts) == metrics(whole)
    assert asked(parts) == asked(whole) and {uid.partition(":")[0] for step in asked(whole) for uid in step} == {"row"}
