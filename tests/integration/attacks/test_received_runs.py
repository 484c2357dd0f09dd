"""Runs that somebody sent: looking at them runs nothing of theirs, and deletes nothing of ours."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest
import yaml
from support.launch import hone, set_environment
from support.viewer_runs import CONFIG, write_run

from hone.viewer.api import READS, Workspace

pytestmark = pytest.mark.slow

EVIL = "from pathlib import Path\nPath({!r}).touch()\ndef loss(*arguments, **options): ...\n"
NAMES = {
    "an import path": {"algorithm": {"adv_estimator": "received.evil:loss"}},
    "an interpolation": {"algorithm": {"adv_estimator": "${trainer.project_name}:loss"},
                         "trainer": {"project_name": "received.evil"}},
}  # fmt: skip
LOOKS = (["runs", "show", "received"], ["runs", "list", "--root", "."], ["profile", "received"],
         ["config", "show", "--derived", "--config-path", "received", "--config-name", "config"],
         ["what-if", "received", "--no-weights"], ["replay", "received"])  # fmt: skip


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose folder holds a module, below the current folder."""
    run = write_run(tmp_path / "received", steps=2, groups=2, n=2, prompts=2)
    (run / "evil.py").write_text(EVIL.format(str(tmp_path / "ran")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return run


def _name(run: Path, more: dict[str, dict[str, str]]) -> None:
    tree = yaml.safe_load(CONFIG)
    for block, values in more.items():
        tree[block] |= values
    (run / "config.yaml").write_text(yaml.safe_dump(tree))


@pytest.mark.parametrize("more", NAMES.values(), ids=list(NAMES))
def test_looking_runs_no_code_of_a_received_run(
    received: Path, tmp_path: Path, more: dict[str, dict[str, str]]
) -> None:
    _name(received, more)
    for words in LOOKS:
        ended = hone(*words, log=tmp_path / "log", cwd=tmp_path)
        assert not (tmp_path / "ran").exists(), words
        assert ended.code == (2 if words[0] in ("config", "what-if", "replay") else 0), ended.output
        assert ("E-trust" in ended.output) == (ended.code == 2)


def test_the_viewer_runs_no_code_of_a_received_run(received: Path, tmp_path: Path) -> None:
    _name(received, NAMES["an import path"])
    workspace = Workspace({"received": received})
    group = READS["groups"](workspace, {})["groups"][0]
    sequence = {"step": str(group["step"]), "uid": group["uid"], "index": "0"}
    assert READS["factors"](workspace, sequence) == [] and READS["tokens"](workspace, sequence)["texts"]
    assert not (tmp_path / "ran").exists()


def test_trust_is_asked_once_until_configuration_or_file_change(received: Path, tmp_path: Path) -> None:
    _name(received, NAMES["an import path"])
    state = {"XDG_STATE_HOME": str(tmp_path / "state")}

    def ran(*more: str) -> bool:
        (tmp_path / "ran").unlink(missing_ok=True)
        words = ("what-if", "received", "--no-weights", *more)
        ended = hone(*words, log=tmp_path / "log", cwd=tmp_path, prepare=partial(set_environment, state))
        assert ("E-trust" in ended.output) != (tmp_path / "ran").exists(), ended.output
        return (tmp_path / "ran").exists()

    assert [ran(), ran("--trust"), ran()] == [False, True, True]
    assert [file.parent.parent for file in (tmp_path / "state").rglob("*") if file.is_file()] == [
        tmp_path / "state/hone"
    ]
    (received / "evil.py").write_text((received / "evil.py").read_text() + "# another\n")
    assert not ran()
    assert ran("--trust") and ran()
    (received / "config.yaml").write_text((received / "config.yaml").read_text() + "# another\n")
    assert not ran()
