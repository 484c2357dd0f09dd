"""Record of the watcher about a driver that is gone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.cluster.watcher import record_end


@pytest.mark.parametrize(
    ("record", "noted"),
    [
        ({"pid": 7, "status": "running"}, True),
        ({"pid": 7, "status": "finished"}, False),
        ({"pid": 8, "status": "running"}, False),
        ({"pid": 7, "plan": []}, False),
    ],
)
def test_only_a_run_of_that_driver_which_has_begun_and_not_ended_has_failed(tmp_path: Path, record: dict, noted: bool):
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert record_end(tmp_path, 7, "killed") is noted
    after = json.loads((tmp_path / "run.json").read_text())
    assert (after.get("status"), after.get("exit_reason")) == (
        ("failed", "killed") if noted else (record.get("status"), None)
    )


def test_a_folder_without_a_run_is_left_alone(tmp_path: Path):
    assert record_end(tmp_path, 7, "killed") is False
    assert not list(tmp_path.iterdir())
