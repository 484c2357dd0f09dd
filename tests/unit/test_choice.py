"""The choice of tests by what changed: a long test runs when what it is about did, and names paths that exist."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import choice
from support.choice import ABOUT, CORE, ROOT, chosen, left_out

HERE = ROOT / "tests/unit/test_choice.py"


def item(*marks: pytest.MarkDecorator, path: Path = HERE, name: str = "test_it") -> Any:
    """A test with these marks."""
    own = [decorator.mark for decorator in marks]
    return SimpleNamespace(
        path=path,
        nodeid=f"{path}::{name}",
        iter_markers=lambda wanted: (mark for mark in own if mark.name == wanted),
        get_closest_marker=lambda wanted: next((mark for mark in own if mark.name == wanted), None),
    )


RING = pytest.mark.long("hone/training/backends", "hone/models/heads.py")
PAGE = pytest.mark.application("hone/apps/lab/viewer")


@pytest.mark.parametrize(
    ("changed", "ring", "page"),
    [
        (None, True, True),
        ([], False, False),
        (["hone/training/backends/fsdp2/ring.py"], True, False),
        (["hone/training/backends.py", "hone/models/heads.pyi"], False, False),
        (["docs/config.md", "hone/models/heads.py"], True, False),
        (["hone/apps/lab/viewer/page/app.js"], False, True),
        (["tests/unit/test_choice.py"], True, True),
        (["tests/support/choice.py"], True, True),
        (["tests/support/world.py"], False, False),
    ],
)
def test_a_change_chooses_what_is_about_it(changed: list[str] | None, ring: bool, page: bool) -> None:
    part = "1/1" if changed is None else "0/1"
    assert chosen(item(RING), changed, part) is ring
    assert chosen(item(PAGE), changed, part) is page
    assert chosen(item(), changed, part) and chosen(item(pytest.mark.slow), changed, part)


def test_a_file_without_a_test_to_choose_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "ROOT", tmp_path)
    short, changed, file = "not long and not learn", ["hone/apps/lab/viewer/page.py"], tmp_path / "test_it.py"
    for mark, markers, left in [
        ('long("hone/cluster")', short, True),
        ('long("hone/cluster")', "long and not alone", False),
        ('application(\n    "hone/apps/lab/viewer", "docs"\n)', short, False),
        ('application("hone/apps/learn")', short, True),
        ('application("hone/apps/learn", *CORE)', short, False),
        ("slow", short, False),
    ]:
        file.write_text(f"import x\n\npytestmark = pytest.mark.{mark}\n")
        assert left_out(file, markers, changed, "0/1") is left, mark
        assert not (
            left_out(file, markers, None, "1/1") or left_out(file, markers, changed, "3/12")
        ) or mark.startswith("long")
    file.write_text('@pytest.mark.long("hone/cluster")\ndef test_it(): ...\n')
    assert not left_out(file, short, [], "0/1")


def test_the_parts_of_the_rest_are_disjoint_and_leave_none_out() -> None:
    tests = [item(mark, name=f"test_{number}") for number in range(25) for mark in (RING, PAGE)]
    runs = [[chosen(one, ["docs/config.md"], f"{k}/7") for one in tests] for k in range(1, 8)]
    assert [sum(column) for column in zip(*runs, strict=True)] == [1] * 50
    assert all(chosen(item(RING, name=f"test_{n}"), ["hone/models/heads.py"], "1/7") for n in range(50))


def test_marks_name_paths_that_exist() -> None:
    missing, found = [path for path in CORE if not (ROOT / path).exists()], 0
    uses = re.compile(rf"pytest\.mark\.(?:{'|'.join(ABOUT)})\b(?:\(([^)]*)\))?")
    for path in (ROOT / "tests").rglob("*.py"):
        for arguments in uses.findall(path.read_text()):
            found += 1
            names = re.findall(r'"([^"]+)"', arguments)
            missing += [f"{path.name}: {name}" for name in names if not (ROOT / name).exists()]
            if not names and arguments != "*CORE":
                missing.append(f"{path.name}: a mark without paths")
    assert not missing and found > 50
