"""What a process publishes is what another reads, at any moment; and its stacks can be had even when it is stuck."""

import re
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launch import context

from hone.insight import activity, stacks


@pytest.fixture
def published(tmp_path: Path):
    activity.begin(tmp_path, "actor", 1)
    yield tmp_path
    activity.end()


def only_record(folder: Path) -> activity.Record:
    (record,) = activity.read_records(folder)
    return record


def test_a_record_says_who_does_what_and_for_whom_it_waits(published: Path):
    assert (only_record(published).name, only_record(published).stage, only_record(published).is_alive()) == (
        "actor[1]",
        "idle",
        True,
    )
    with activity.doing("step 3"), activity.waiting("scores", on=["reward worker"], limit=2.0):
        inside = only_record(published)
        activity.tick()
        after = only_record(published)
    assert inside.stage == "step 3 > scores"
    assert [(s.waits, s.waits_on, s.limit) for s in inside.spans] == [
        (False, (), None),
        (True, ("reward worker",), 2.0),
    ]
    assert after.ticks == inside.ticks + 1 and after.spans == inside.spans
    assert only_record(published).spans == () and only_record(published).ticks > after.ticks


def test_nothing_is_left_of_a_process_that_leaves_in_good_order(tmp_path: Path):
    activity.begin(tmp_path, "driver")
    activity.end()
    assert list(tmp_path.iterdir()) == []
    activity.tick()  # and reporting goes on to be harmless
    with activity.doing("nothing"):
        assert activity.read_records(tmp_path) == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.text(max_size=3000)), max_size=30))
def test_spans_end_in_any_order(tmp_path_factory, script):
    """Tasks of an event loop overlap: what is shown is what has begun and not ended, the innermost never lost."""
    folder = tmp_path_factory.mktemp("spans")
    activity.begin(folder, "driver")
    open_spans = []
    try:
        for opens, which, text in script:
            if opens:
                span = activity.doing(text)
                span.__enter__()
                open_spans.append((text, span))
            elif open_spans:
                open_spans.pop(which % len(open_spans))[1].__exit__(None, None, None)
            names = [span.what for span in only_record(folder).spans]
            assert names == [text for text, _ in open_spans][len(open_spans) - len(names) :]
            if open_spans and len(open_spans[-1][0]) < 500:
                assert names
    finally:
        for _, span in open_spans:
            span.__exit__(None, None, None)
        activity.end()


def test_a_reader_never_sees_half_a_record(published: Path):
    stop = threading.Event()

    def write() -> None:
        texts = ["a" * 300, "b" * 3]
        while not stop.is_set():
            for text in texts:
                with activity.doing(text):
                    activity.tick()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        seen = {record.stage for _ in range(2000) for record in activity.read_records(published)}
    finally:
        stop.set()
        thread.join()
    assert seen <= {"idle", "a" * 300, "b" * 3} and len(seen) > 1


def _work(folder: Path, seconds: float) -> None:
    activity.begin(folder, "actor", 0)
    with activity.doing("update_actor"):
        time.sleep(seconds)


@pytest.mark.parametrize("write", ["_VERSION", "_SLOT", "_HEAD"])
def test_a_process_killed_while_it_writes_leaves_its_previous_record(published: Path, monkeypatch, write):
    """Any of the packed writes of a record may be the one that a process does not reach."""
    with activity.doing("step 3"):
        before = only_record(published)
        with monkeypatch.context() as patches:
            patches.setattr(activity, write, Unreached(getattr(activity, write)))
            with pytest.raises(Killed):
                activity._publisher.push(activity.Span("update_actor", time.time()))
        activity._publisher._spans.pop()
        assert only_record(published).spans == before.spans


class Killed(Exception):
    """End of the process."""


class Unreached:
    """Struct whose process ends before it writes."""

    def __init__(self, packed: struct.Struct) -> None:
        self.size = packed.size

    def pack_into(self, *_: object) -> None:
        raise Killed


def test_a_killed_process_leaves_its_last_record(tmp_path: Path):
    process = context().Process(target=_work, args=(tmp_path, 60.0))
    process.start()
    while not [record for record in activity.read_records(tmp_path) if record.spans]:
        time.sleep(0.01)
    assert only_record(tmp_path).is_alive()
    process.kill()
    process.join()
    assert only_record(tmp_path).stage == "update_actor" and not only_record(tmp_path).is_alive()
    activity.clear(tmp_path)
    assert list(tmp_path.iterdir()) == []


STUCK = {
    "holding the interpreter lock": "import re; re.match(r'(a+)+$', 'a' * 60 + 'b')",
    "waiting for a lock": "import threading; lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "in a loop": "\nwhile True:\n    pass",
}


@pytest.mark.parametrize("how", STUCK)
def test_stacks_of_a_stuck_process(tmp_path: Path, how: str):
    program = f"""
from pathlib import Path
from hone.insight import activity
activity.begin(Path({str(tmp_path)!r}), "driver")
def culprit():
    with activity.doing("score"):
        exec({STUCK[how]!r})
culprit()
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    try:
        while not [record for record in activity.read_records(tmp_path) if record.spans]:
            assert process.poll() is None
            time.sleep(0.02)
        record = only_record(tmp_path)
        collected = stacks.collect({record.pid: record.stacks_file}, {record.pid: record.thread})[record.pid]
    finally:
        process.kill()
        process.wait()
    assert collected.problem == "" and "culprit" in [frame.function for frame in collected.frames]
    assert collected.collective is None


def test_a_dead_process_has_no_stacks(tmp_path: Path):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    (tmp_path / "file").touch()
    assert stacks.collect({process.pid: tmp_path / "file"}, {})[process.pid].problem == "it is dead"


def test_the_thread_that_works_is_selected_among_others():
    text = """Thread 0x00007f00000000aa (most recent call first):
  File "/x/threading.py", line 5 in wait
Current thread 0x00007f00000000bb (most recent call first):
  File "/site-packages/torch/_ops.py", line 3 in __call__
  File "/site-packages/torch/distributed/distributed_c10d.py", line 7 in all_reduce
  File "/x/user.py", line 9 in step
"""
    frames = stacks.parse(text, 0x7F00000000BB)
    assert [frame.function for frame in frames] == ["__call__", "all_reduce", "step"]
    assert stacks.ThreadStacks(text, frames).collective == "all_reduce"
    assert stacks.ThreadStacks(text, stacks.parse(text, 0x7F00000000AA)).collective is None


def test_no_heavy_import():
    """Reward workers and the watchdog start without torch."""
    heavy = (
        "import sys, hone.cluster.watcher; print([m for m in ('torch', 'ray', 'numpy', 'yaml') if m in sys.modules])"
    )
    assert re.fullmatch(
        r"\[\]\s*", subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout
    )
