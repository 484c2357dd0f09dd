"""What a checkpoint was made from may not change unnoticed."""

import pytest

from hone.config import load_config
from hone.config.fields import AFTER_EACH_EPOCH
from hone.config.tree import RLConfig
from hone.trainers.run_checkpoints import changed_keys, redacted
from hone.trainers.session import RunSession


def test_changed_keys_names_every_leaf_that_differs():
    old, new = RLConfig(), RLConfig()
    assert changed_keys(redacted(old), redacted(new)) == []
    new.actor_rollout_ref.model.lora_rank = 8
    new.data.train_files = ["a", "b"]
    assert changed_keys(redacted(old), redacted(new)) == [
        "data.train_files: None -> ['a', 'b']",
        "actor_rollout_ref.model.lora_rank: 0 -> 8",
    ]


def test_keys_that_one_side_lacks():
    assert changed_keys({"a": {"x": 1}, "b": 2}, {"a": {"y": 3}, "b": 2}) == ["a.x: 1 -> None", "a.y: None -> 3"]


def test_credentials_never_reach_a_checkpoint():
    config = RLConfig()
    config.reward.custom_reward_function.reward_kwargs = {"api_key": "sk-12345"}
    assert "sk-12345" not in str(redacted(config))


@pytest.mark.parametrize(
    ("frequency", "due"),
    [(0, []), (-1, [10]), (4, [4, 8, 10]), (AFTER_EACH_EPOCH, [3, 6, 9, 10])],
)
def test_frequencies(frequency, due, tmp_path):
    trainer = load_config(RLConfig, [f"trainer.default_local_dir={tmp_path}", f"trainer.save_freq={frequency}"])
    session = RunSession(trainer)
    session.total_steps, session.steps_per_epoch = 10, 3
    assert [step for step in range(1, 11) if session.save_due(step)] == due
