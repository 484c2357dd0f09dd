"""Timeline of a step: every span lies within the one above it, inside the step, and none is lost but those counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.apps.lab.viewer import overview
from hone.apps.lab.viewer.overview import step_timeline

pytestmark = pytest.mark.application("hone/apps/lab/viewer", "hone/insight", "hone/apps/lab", "hone/rewards")


def process(run: Path, role: str, pid: int, spans: list[tuple[str, float, float, int, bool]]) -> None:
    folder = run / "timeline"
    folder.mkdir(exist_ok=True)
    head = {"role": role, "rank": None, "pid": pid, "host": "here"}
    (folder / f"{role}.{pid}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (head, *spans)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    process(
        tmp_path,
        "driver",
        1,
        [
            ("gen", 10.0, 13.0, 5, False),
            ("tool", 11.0, 12.0, 5, True),
            ("update_actor", 13.0, 15.0, 5, False),
            ("step 1", 10.0, 15.5, 5, False),
            ("step 2", 16.0, 20.0, 5, False),
        ],
    )
    process(tmp_path, "reward worker", 2, [("score", 12.5, 16.5, 7, False), ("score", 17.0, 18.0, 7, False)])
    return tmp_path


def test_a_step_has_the_spans_that_overlap_it_cut_at_its_ends(run: Path) -> None:
    shown = step_timeline(run, 1)
    assert (shown["steps"], shown["step"], shown["seconds"], shown["left_out"]) == ([1, 2], 1, 5.5, 0)
    driver, worker = shown["processes"]
    assert driver["name"] == "driver" and driver["rows"] == [
        [["step 1", 0.0, 5.5, False]],
        [["gen", 0.0, 3.0, False], ["update_actor", 3.0, 5.0, False]],
        [["tool", 1.0, 2.0, True]],
    ]
    assert worker["rows"] == [[["score", 2.5, 5.5, False]]]
    newest = step_timeline(run, None)
    assert newest["step"] == 2 and [len(row) for row in newest["processes"][1]["rows"]] == [2]


def test_the_shortest_spans_are_left_out_and_counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "MOST_SPANS", 3)
    shown = step_timeline(run, 1)
    kept = [span[0] for one in shown["processes"] for row in one["rows"] for span in row]
    assert shown["left_out"] == 2 and sorted(kept) == ["gen", "score", "step 1"]


def test_a_run_without_a_timeline_has_none(tmp_path: Path) -> None:
    assert step_timeline(tmp_path, 3)["steps"] == []
