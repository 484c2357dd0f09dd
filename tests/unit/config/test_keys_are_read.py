"""No key stands in the tree that nothing reads: each key's last name is an attribute that some room reads."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest

from hone.config import TREES, RLConfig, documentation

PACKAGE = Path(__file__).parents[3] / "hone"
NOT_READERS = ("config", "preflight", "cli")
"""Rooms that look at keys to check or print them, not to act on them."""

WHOLE_BLOCKS = {
    "algorithm.kl_ctrl": "vars(config.algorithm.kl_ctrl)",
    "algorithm.rollout_correction": "vars(config).items()",
    "loss": "vars(config.loss).items()",
}
"""Blocks whose keys are handed on together, with the expression that does so."""

OPTIONS = {
    "algorithm": "estimator.options",
    "actor_rollout_ref.actor": "loss.options",
    "actor_rollout_ref.actor.policy_loss": "loss.options",
}
"""Blocks whose keys reach an advantage estimator or a policy loss by the name of its option."""


def methods(block: str) -> list:
    """What takes its options from a block."""
    from hone.algorithms import advantage_estimators, policy_losses

    registry = advantage_estimators if block == "algorithm" else policy_losses
    return [registry.get(name) for name in registry]


def default_of(method: Any, option: str) -> Any:
    """The default of an option where the mathematics is."""
    functions = [getattr(method, name, None) for name in ("compute", "per_token", "across_batch")]
    parameters = [inspect.signature(function).parameters for function in functions if function]
    return next(found[option].default for found in parameters if option in found)


@functools.cache
def sources() -> list[str]:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in NOT_READERS]
    files += [
        PACKAGE / "config" / name for name in ("data.py", "derived.py", "specs.py", "parallel.py", "distillation.py")
    ]  # these act on keys
    return [path.read_text(encoding="utf-8") for path in files]


@functools.cache
def attributes_read(*texts: str) -> set[str]:
    """Names read as ``something.name`` anywhere in the texts."""
    return {
        node.attr
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def read_as_option(path: str) -> bool:
    block, _, last = path.rpartition(".")
    return block in OPTIONS and any(last in method.options for method in methods(block))


def test_keys_have_the_defaults_of_the_options_they_set() -> None:
    """So that a method called in a notebook is the method of a run."""
    own = {"clip_ratio_low", "clip_ratio_high"}  # null: clip_ratio, whose default is theirs
    compared = set()
    for key in documentation(RLConfig):
        block = key.path.rpartition(".")[0]
        for method in methods(block) if block in OPTIONS else ():
            if key.last in method.options and key.last not in own:
                default = default_of(method, key.last)
                assert key.default == default or (not key.default and not default), (method.name, key.path)
                compared.add(key.last)
    assert {"gamma", "lam", "tau_pos", "clip_cov_ratio", "dro_beta", "clip_ratio_c"} <= compared
    assert {key.last: key.default for key in documentation(RLConfig)}["clip_ratio"] == 0.2


@pytest.mark.parametrize("tree", TREES.values())
def test_every_key_is_read(tree: type) -> None:
    texts = sources()
    read = attributes_read(*texts)
    for expression in [*WHOLE_BLOCKS.values(), *OPTIONS.values()]:
        assert any(expression in text for text in texts), f"{expression} is gone: its keys need readers of their own"
    unread = [
        key.path
        for key in documentation(tree)
        if key.last not in read
        and key.path.rpartition(".")[0]
        not in (*WHOLE_BLOCKS, "preflight")  # that block is read by the checks themselves
        and not read_as_option(key.path)
    ]
    assert unread == []


def test_the_check_sees_reads_only() -> None:
    assert attributes_read("a.b.c = x.y", "f(z)") == {"b", "y"}
