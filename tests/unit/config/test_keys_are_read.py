"""No key stands in the tree that nothing reads: each key's last name is an attribute that some room reads."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from hone.config import RLConfig, SFTConfig, documentation

PACKAGE = Path(__file__).parents[3] / "hone"
NOT_READERS = ("config", "preflight", "cli")
"""Rooms that look at keys to check or print them, not to act on them."""

WHOLE_BLOCKS = {"algorithm.kl_ctrl": "vars(config.algorithm.kl_ctrl)"}
"""Blocks whose keys are handed on together, with the expression that does so."""

OPTIONS = {"algorithm": "estimator.options"}
"""Blocks whose keys reach an advantage estimator by the name of its option."""


def sources() -> list[str]:
    files = [path for path in PACKAGE.rglob("*.py") if path.relative_to(PACKAGE).parts[0] not in NOT_READERS]
    return [path.read_text(encoding="utf-8") for path in files]


def attributes_read(texts: list[str]) -> set[str]:
    """Names read as ``something.name`` anywhere in the texts."""
    return {
        node.attr
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def read_as_option(path: str) -> bool:
    from hone.algorithms import advantage_estimators

    block, _, last = path.rpartition(".")
    return block in OPTIONS and any(last in advantage_estimators.get(name).options for name in advantage_estimators)


@pytest.mark.parametrize("tree", [RLConfig, SFTConfig])
def test_every_key_is_read(tree: type) -> None:
    texts = sources()
    read = attributes_read(texts)
    for expression in [*WHOLE_BLOCKS.values(), *OPTIONS.values()]:
        assert any(expression in text for text in texts), f"{expression} is gone: its keys need readers of their own"
    unread = [
        key.path
        for key in documentation(tree)
        if key.last not in read and key.path.rpartition(".")[0] not in WHOLE_BLOCKS and not read_as_option(key.path)
    ]
    assert unread == []


def test_the_check_sees_reads_only() -> None:
    assert attributes_read(["a.b.c = x.y", "f(z)"]) == {"b", "y"}
