"""The public API changes only with a line in the changelog.

`docs/public_api.txt` has the API as it is, and `released_api.txt` as the last release had it. At a release the one is copied over the
other (`docs/versions.md`).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.public_api import PUBLIC, changed_names, public_api, unmentioned

import hone
import hone.api

ROOT = Path(__file__).resolve().parents[3]
CURRENT, RELEASED = ROOT / "docs" / "public_api.txt", Path(__file__).with_name("released_api.txt")
PAGE = """hone.train(model: str, steps: int = 1) -> Run
hone.Run(path: str) -> None
hone.Run.plot(self) -> Path
hone.agents.tools.tool(function: Any) -> Tool
"""
CHANGELOG = """# Changelog

## 0.2.0 (unreleased)

- {line}

## 0.1.0

- `hone.train` and `Run.plot` came.
"""


def test_the_page_is_what_the_package_has() -> None:
    assert CURRENT.read_text(encoding="utf-8") == public_api(), "run scripts/make_docs"


def test_what_hone_exports_is_public() -> None:
    assert set(PUBLIC["hone"].split()) == set(hone.__all__)
    assert set(PUBLIC["hone"].split()) | set(PUBLIC["hone.api"].split()) == set(hone.api.__all__) | {"NoVerdict"}


def test_changes_since_the_release_are_in_the_changelog() -> None:
    names = changed_names(RELEASED.read_text(encoding="utf-8"), CURRENT.read_text(encoding="utf-8"))
    missing = unmentioned(names, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert not missing, f"CHANGELOG.md, unreleased: name each in `code`, with what changed: {missing}"


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        ("steps: int = 1", "steps: int = 2", "hone.train"),
        ("hone.Run.plot(self) -> Path\n", "", "hone.Run.plot"),
        ("hone.Run.plot(self)", "hone.Run.draw(self)\nhone.Run.plot(self)", "hone.Run.draw"),
        ("function: Any", "function: Any, name: str", "hone.agents.tools.tool"),
    ],
)
def test_a_change_is_found(before: str, after: str, name: str) -> None:
    assert changed_names(PAGE, PAGE.replace(before, after)) == [name]


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("hone.train", "`hone.train` has another default", True),
        ("hone.train", "`train(steps=2)` is the default", True),
        ("hone.train", "train is different", False),
        ("hone.train", "`pretrain` and `hone.train.steps`", False),
        ("hone.Run.plot", "`Run.plot` draws", True),
        ("hone.Run.plot", "`plot` draws", False),  # of which class?
        ("hone.Run.plot", "`Run` draws", False),
        ("hone.agents.tools.tool", "`hone.agents.tools.tool` takes a name", True),
        ("hone.agents.tools.tool", "`hone.tool` takes a name", False),
    ],
)
def test_a_line_names_what_changed(name: str, line: str, said: bool) -> None:
    """The lines of released sections do not count."""
    assert (unmentioned([name], CHANGELOG.format(line=line)) == []) == said
