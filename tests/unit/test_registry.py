"""Names and import paths: what is found, and what is said when it is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hone.errors import ConfigError
from hone.registry import Registry


def number(found: object, path: str) -> int:
    if not isinstance(found, int):
        raise TypeError(f"it is a {type(found).__name__}, not an int")
    return found


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[int]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "numbers_of_mine.py").write_text("seven = 7\nword = 'x'\n\ndef call():\n    pass\n")
    (tmp_path / "broken_of_mine.py").write_text("x = 1\nraise RuntimeError('no')\n")
    (tmp_path / "needy_of_mine.py").write_text("import not_installed_anywhere\n")
    return Registry("number", key="some.key", adopt=number)


def test_an_import_path_is_found_in_the_current_directory(registry: Registry[int]) -> None:
    assert registry.get("numbers_of_mine:seven") == 7
    assert registry.names() == [] and "numbers_of_mine:seven" not in registry


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("number_of_mine:seven", ["'number_of_mine'", "numbers_of_mine"]),
        ("numbers_of_mine:cal", ["numbers_of_mine.py", "'cal'", "call"]),
        ("numbers_of_mine:word", ["'numbers_of_mine:word'", "str", "int"]),
        ("broken_of_mine:x", ["'broken_of_mine'", "line 2: RuntimeError: no"]),
        ("needy_of_mine:x", ["'needy_of_mine'", "line 1", "not_installed_anywhere"]),
        ("numbers_of_mine:", ["'numbers_of_mine:'", "module:attribute"]),
        (":seven", ["':seven'", "module:attribute"]),
    ],
)
def test_what_an_import_path_may_lack(registry: Registry[int], path: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        registry.get(path)
    assert "some.key" in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_without_adoption_a_colon_is_part_of_a_name() -> None:
    with pytest.raises(ConfigError, match="'os:path'"):
        Registry("number").get("os:path")
