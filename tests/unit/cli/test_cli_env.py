"""`hone env list`: every environment with its package, and what is installed where."""

import json
import sys

import pytest
from support.messages import raises
from typer.testing import CliRunner

from hone.agents.environments import ENVIRONMENTS, listing
from hone.cli.environments import app
from hone.errors import ConfigError


def listed(*words: str) -> dict[str, dict]:
    said = CliRunner().invoke(app, ["list", "--json", *words], catch_exceptions=False)
    assert said.exit_code == 0
    return {row["name"]: row for row in json.loads(said.stdout)}


def test_every_environment_is_listed_with_what_it_needs() -> None:
    rows = listed()
    assert rows.keys() == {*ENVIRONMENTS.names(), "verifiers"} >= listing.PACKAGES.keys()
    assert rows["tic_tac_toe"]["package"] is None and rows["tic_tac_toe"]["install"] is None
    for row in rows.values():
        assert (row["install"] is None) == (row["package"] is None or row["installed"] is not None), row
    shown = CliRunner().invoke(app, ["list"], catch_exceptions=False)
    assert shown.exit_code == 0 and all(row["rows"] in shown.stdout for row in rows.values())


def test_versions_of_another_python(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in (("gem_llm", "0.1.7"), ("unknown", "2")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')  # without -I
    python.chmod(0o755)
    rows = listed("--python", str(python))
    assert rows["gem"]["installed"] == "0.1.7" and rows["gem"]["install"] is None
    assert "textarena" in rows["textarena"]["install"] or rows["textarena"]["installed"]
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no\n")
    broken.chmod(0o755)
    for path in (broken, tmp_path / "missing"):
        with raises(ConfigError, str(path), where="--python"):
            listing.environments(str(path))
