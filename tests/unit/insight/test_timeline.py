"""Timeline of a process: what is recorded, bounded, read again, and its form as a Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.apps.lab.profile import chrome_trace, nested_lanes, write_chrome_trace
from hone.insight import activity, timeline
from hone.insight.timeline import FOLDER, DoneSpan, ProcessTimeline, Recorder, read_timeline

DRIVER = {"role": "driver", "rank": None, "pid": 7, "host": "here"}


@pytest.fixture
def recorded(tmp_path: Path):
    activity.begin(tmp_path / activity.FOLDER, "driver")
    activity.record_timeline()
    yield tmp_path
    activity.end()


def test_finished_spans_are_recorded_with_their_times_and_waits(recorded: Path):
    with activity.doing("step 1"), activity.doing("gen"), activity.waiting("groups", on=["rollout"]):
        activity.tick()
    activity.end()
    (process,) = read_timeline(recorded)
    assert (process.name, [(span.what, span.waits) for span in process.spans]) == (
        "driver",
        [("step 1", False), ("gen", False), ("groups", True)],
    )
    step, gen, wait = process.spans
    assert step.begin <= gen.begin <= wait.begin <= wait.end <= gen.end <= step.end
    assert len({span.thread for span in process.spans}) == 1


def test_only_processes_of_a_recording_run_record(recorded: Path):
    activity.end()
    activity.begin(recorded / activity.FOLDER, "actor", 0)
    with activity.doing("actor.update"):
        pass
    activity.end()
    assert [(p.name, len(p.spans)) for p in read_timeline(recorded)] == [("actor[0]", 1)]
    activity.clear(recorded / activity.FOLDER)
    activity.begin(recorded / activity.FOLDER, "actor", 1)
    with activity.doing("actor.update"):
        pass
    activity.end()
    assert [p.name for p in read_timeline(recorded)] == ["actor[0]"]
    timeline.clear(recorded)
    assert read_timeline(recorded) == []


def test_spans_reach_the_file_after_a_second_and_not_before(tmp_path: Path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(timeline.time, "monotonic", lambda: now[0])
    path = tmp_path / "driver.7.jsonl"
    recorder = Recorder(path, DRIVER)
    recorder.add("a", 1.0, 0, False)
    assert not path.exists()
    now[0] += 1.1
    recorder.add("b", 2.0, 0, False)
    assert len(path.read_text().splitlines()) == 3


def test_a_process_keeps_its_newest_spans_within_the_limit(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(timeline, "LIMIT_BYTES", 2000)
    (tmp_path / timeline.FOLDER).mkdir()
    recorder = Recorder(tmp_path / timeline.FOLDER / "driver.7.jsonl", DRIVER)
    for number in range(500):
        recorder.add(f"span {number}", float(number), 0, False)
        recorder.write()
    (process,) = read_timeline(tmp_path)
    kept = [int(span.what.split()[1]) for span in process.spans]
    assert kept == list(range(kept[0], 500)) and 20 < len(kept) < 100
    assert sum(path.stat().st_size for path in (tmp_path / timeline.FOLDER).iterdir()) < 2 * 2100


def test_half_a_line_of_a_killed_process_is_left_out(tmp_path: Path):
    path = tmp_path / timeline.FOLDER / "driver.7.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(DRIVER) + '\n["a", 1.0, 2.0, 0, false]\n["b", 3.0')
    (process,) = read_timeline(tmp_path)
    assert [tuple(span) for span in process.spans] == [("a", 1.0, 2.0, 0, False)]


def test_a_disk_that_refuses_spans_does_not_end_the_run(tmp_path: Path):
    recorder = Recorder(tmp_path / "no folder" / "driver.7.jsonl", DRIVER)
    recorder.add("a", 1.0, 0, False)
    recorder.write()
    assert list(tmp_path.iterdir()) == []


def test_the_trace_has_the_fields_of_the_format(tmp_path: Path):
    spans = [DoneSpan("step 1", 10.0, 12.5, 9, False), DoneSpan("gen", 10.5, 11.0, 9, True)]
    other = [DoneSpan("actor.update", 11.0, 12.0, 4, False)]
    processes = [ProcessTimeline("driver", None, 7, "a", spans), ProcessTimeline("actor", 0, 7, "b", other)]
    write_chrome_trace(processes, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = [(e["name"], e["cat"], e["ts"], e["dur"], e["pid"], e["tid"]) for e in events if e["ph"] == "X"]
    assert complete == [
        ("step 1", "work", 0, 2_500_000, 1, 1),
        ("gen", "wait", 500_000, 500_000, 1, 1),
        ("actor.update", "work", 1_000_000, 1_000_000, 2, 1),
    ]
    assert [(e["name"], e["ts"], e["s"]) for e in events if e["ph"] == "i"] == [("step 1", 0, "g")]
    named = {(e["pid"], e["name"]): e["args"] for e in events if e["ph"] == "M"}
    assert named[1, "process_name"]["name"].startswith("driver") and named[2, "process_name"]["name"].startswith(
        "actor[0]"
    )
    assert {e["ph"] for e in events} == {"X", "M", "i"}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=25))
def test_spans_of_a_line_nest_and_none_is_lost(pairs):
    """Any two spans of a line of the trace are disjoint, or one holds the other."""
    spans = [DoneSpan(str(i), begin / 7, (begin + length) / 7, 0, False) for i, (begin, length) in enumerate(pairs)]
    spans.sort(key=lambda span: (span.begin, -span.end))
    assert sorted(span for lane in nested_lanes(spans) for span in lane) == sorted(spans)
    events = [e for e in chrome_trace([ProcessTimeline("actor", 0, 1, "a", spans)])["traceEvents"] if e["ph"] == "X"]
    lines: dict[int, list[tuple[int, int]]] = {}
    for event in events:
        lines.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for line in lines.values():
        for i, (a, b) in enumerate(line):
            for c, d in line[i + 1 :]:
                assert b <= c or d <= a or (a <= c and d <= b) or (c <= a and b <= d)


def test_tasks_that_overlap_in_one_thread_take_two_lines():
    spans = [DoneSpan("a", 0.0, 2.0, 0, False), DoneSpan("b", 1.0, 3.0, 0, False), DoneSpan("c", 2.5, 2.8, 0, False)]
    assert [[span.what for span in lane] for lane in nested_lanes(spans)] == [["a", "c"], ["b"]]


def test_a_line_that_a_full_disk_cut_costs_its_spans_only(tmp_path: Path):
    recorder = Recorder(tmp_path / FOLDER / "actor-0.7.jsonl", {"role": "actor", "rank": 0, "pid": 7, "host": "a"})
    (tmp_path / FOLDER).mkdir()
    for begin, name in enumerate(("first", "lost", "last")):
        recorder.add(name, float(begin), 1, False)
        recorder.write()
        if name == "first":
            with (tmp_path / FOLDER / "actor-0.7.jsonl").open("a", encoding="utf-8") as file:
                file.write('["cut", 1.')
    (process,) = read_timeline(tmp_path)
    assert [span.what for span in process.spans] == ["first", "last"]
