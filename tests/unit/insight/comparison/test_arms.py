"""Arms of runs: which keys tell configurations apart."""

import pytest

from hone.apps.lab.compare import IDENTITY_KEYS, split_arms, training_differences
from hone.config.keys import documentation
from hone.config.trees import TREES


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("insight.ignore", ([], ["slow_steps"])),
        ("insight.stop_on", ([], ["zero_reward"])),
        ("trainer.rollout_dump_share", (0.05, 0.1)),
        ("trainer.rollout_dump_steps", ([], [3])),
        ("trainer.log_rollout_samples", (8, 0)),
    ],
)
def test_what_a_run_writes_does_not_tell_arms_apart(key, values):
    runs = [
        {"optim.lr": rate, key: value, "trainer.seed": 1}
        for rate, value in zip((1, 1, 2), (*values, values[0]), strict=True)
    ]
    assert split_arms(runs) == [[0, 1], [2]]
    assert not training_differences(*runs[:2])
    assert key in {known.path for tree in TREES.values() for known in documentation(tree)}


def test_every_prefix_is_of_a_key():
    known = {key.path for tree in TREES.values() for key in documentation(tree)}
    assert [prefix for prefix in IDENTITY_KEYS if not any(key.startswith(prefix) for key in known)] == []
