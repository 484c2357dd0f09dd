"""What a checkpoint was made from may not change unnoticed."""

from hone.config.tree import RLConfig
from hone.trainers.run_checkpoints import changed_keys, redacted


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
