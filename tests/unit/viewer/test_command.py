"""The runs that `hone view` opens."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hone.apps.lab.viewer.command import ViewRequest, chosen_runs, view
from hone.errors import HoneError

pytestmark = pytest.mark.application("hone/apps/lab/viewer", "hone/insight", "hone/apps/lab", "hone/rewards")


def test_runs_are_named_by_directory_by_name_below_the_root_or_all(run_path: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(run_path, tmp_path / "runs" / "project" / name)
    first, second = (tmp_path / "runs" / "project" / name for name in ("one", "two"))
    assert chosen_runs([str(first), "project/two"], tmp_path / "runs") == {"one": first, "two": second}
    assert set(chosen_runs([], tmp_path / "runs").values()) == {first, second}
    archive = shutil.copytree(run_path / "rollouts", tmp_path / "imported")
    assert chosen_runs([str(archive)], tmp_path / "none") == {"imported": archive}
    same = shutil.copytree(run_path, tmp_path / "other" / "one")
    assert chosen_runs([str(first), str(same)], tmp_path) == {"one": first, str(same): same}


def test_no_run_and_a_taken_port_are_the_users_mistakes(run_path: Path, tmp_path: Path) -> None:
    for names in ([], ["missing"]):
        with pytest.raises(HoneError) as error:
            chosen_runs(names, tmp_path)
        assert error.value.code == "E-runs"
    with pytest.raises(HoneError) as error:
        view(ViewRequest([str(run_path)], host="192.0.2.1", port=1, open_browser=False))  # no address of this machine
    assert error.value.code == "E-config"
