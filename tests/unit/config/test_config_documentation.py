"""Every key is documented, and the page says what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages.config import config_page

from hone.config import TREES, RLConfig, documentation
from hone.config.keys import blocks, field_docs, leaf_values, nearest_keys
from hone.config.run import TrainerConfig

PAGE = Path(__file__).parents[3] / "docs" / "config.md"


@pytest.mark.parametrize("tree", TREES.values())
def test_every_key_and_block_has_a_docstring(tree: type) -> None:
    assert [key.path for key in documentation(tree) if len(key.doc) < 10] == []
    assert [path for path, doc in blocks(tree).items() if len(doc) < 5] == []


@pytest.mark.parametrize("tree", TREES.values())
def test_documentation_lists_every_leaf_with_its_default(tree: type) -> None:
    assert [(key.path, key.default) for key in documentation(tree)] == list(leaf_values(tree()))


def test_documentation_follows_bases_and_block_defaults() -> None:
    assert field_docs(TrainerConfig)["seed"] == "Seed of everything random in the run."
    defaults = {key.path: key.default for key in documentation(RLConfig)}
    assert defaults["critic.optim.lr"] == 1e-5 and defaults["actor_rollout_ref.actor.optim.lr"] == 1e-6


def test_types_and_bounds_are_words() -> None:
    keys = {key.path: key for key in documentation(RLConfig)}
    assert keys["critic.ppo_epochs"].type == "an integer or null" and keys["critic.ppo_epochs"].allowed == ">= 1"
    assert keys["algorithm.kl_penalty"].type == "the name of a KL estimator"
    assert keys["data.truncation"].allowed == "error, drop, truncate, left, right, middle"
    assert keys["trainer.logger"].type == "a list of strings"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == config_page(), "run scripts/make_docs"


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("algorithm.group_size", "actor_rollout_ref.rollout.n"),
        ("actor.ppo_minibatch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("trainer.n_epochs", "trainer.total_epochs"),
        ("rollout.tempature", "actor_rollout_ref.rollout.temperature"),
        ("seed", "trainer.seed"),
        ("kl_coef", "algorithm.kl_ctrl.kl_coef"),
    ],
)
def test_nearest_key(wrong: str, meant: str) -> None:
    assert meant in [key.path for key in nearest_keys(wrong, RLConfig)]


def test_nothing_is_near_nonsense() -> None:
    assert nearest_keys("zzzzqqqq", RLConfig) == []
