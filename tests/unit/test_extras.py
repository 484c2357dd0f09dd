"""The command that installs an extra: from where Hone came, with what the environment has (PEP 610's origins)."""

from __future__ import annotations

import importlib.util
import json
import shlex
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from hone.extras import install_command, install_packages

WHEEL = "https://example.org/hone_rl-1.0-py3-none-any.whl"


def installed_from(monkeypatch: pytest.MonkeyPatch, origin: dict[str, Any] | None) -> None:
    record = SimpleNamespace(read_text=lambda name: None if origin is None else json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: record)


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        (None, ["hone-rl[serve]"]),
        ({"url": WHEEL, "archive_info": {}}, [f"hone-rl[serve] @ {WHEEL}"]),
        ({"url": "file:///my%20code/hone", "dir_info": {"editable": True}}, ["-e", "/my code/hone[serve]"]),
        ({"url": "file:///my%20code/hone", "dir_info": {}}, ["/my code/hone[serve]"]),
        ({"url": f"file://{Path.cwd()}", "dir_info": {"editable": True}}, ["-e", ".[serve]"]),
    ],
    ids=["index", "wheel", "checkout", "folder", "here"],
)
def test_the_command_installs_hone_from_where_it_came(
    origin: dict[str, Any] | None, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed_from(monkeypatch, origin)
    assert shlex.split(install_command("serve"))[-len(words) :] == words
    if not origin or "archive_info" in origin:
        assert Requirement(words[0]).extras == {"serve"}


def test_a_tree_that_was_never_installed_is_the_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.chdir("/")
    *_, editable, folder = shlex.split(install_command("serve"))
    assert editable == "-e" and (Path(folder.removesuffix("[serve]")) / "pyproject.toml").is_file()


@pytest.mark.parametrize(("has_pip", "installer"), [(True, "pip install"), (False, "uv pip install")])
def test_an_environment_without_pip_is_told_of_uv(
    has_pip: bool, installer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if has_pip else None)
    assert install_packages("--force-reinstall", "torch>=2.9") == f"{installer} --force-reinstall 'torch>=2.9'"
