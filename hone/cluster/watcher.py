"""Watchdog process: detect a run without progress, report the reason, and end a driver that cannot end itself.

        driver -> watcher   "taken" (a report was read), "on" (the run continues), "bye" (the run has ended)
    watcher -> driver   one JSON object for each hang: report, summary, reason, culprits

It is a separate program, so that a driver that holds the interpreter lock, or waits for a lock forever, is still detected. It
imports neither torch nor Ray and wakes once per second.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hone.cluster.watchdog import Watched, record_end
from hone.errors import HoneError
from hone.insight.activity import FOLDER, Record, birth, read_records
from hone.insight.environment import oom_kills
from hone.insight.run_files import disk_errors
from hone.insight.stacks import Frame, ThreadStacks, collect

_LIBRARY = (
    "/torch/",
    "/ray/",
    "/threading.py",
    "/asyncio/",
    "/concurrent/",
    "/selectors.py",
    "/subprocess.py",
    "/importlib/",
)


@dataclass(frozen=True)
class Wait:
    """Wait of one process.

    Attributes:
        record: record of the process.
        on: names of the processes that it waits for; empty if it waits for none of the run.
        how: description in words.
        idle: whether it has no work.
        dead: whether it is dead without having ended in good order.
    """

    record: Record
    on: tuple[str, ...]
    how: str
    idle: bool = False
    dead: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Reason for a hang.

    Attributes:
        waits: wait of every process, in the order of their names.
        culprits: processes that the others wait for.
        reason: reason in one sentence.
    """

    waits: tuple[Wait, ...]
    culprits: tuple[Record, ...]
    reason: str


def diagnose(records: Sequence[Record], stacks: Mapping[int, ThreadStacks]) -> Diagnosis:
    """Find the processes that all others wait for.

    Args:
        records: records of all processes of the run.
        stacks: stacks of the processes that answered, by pid.
    """
    waits = {record.name: _wait(record, records, stacks) for record in records}
    dead = [wait.record for wait in waits.values() if wait.dead]
    if dead:
        return _result(waits, dead, f"{_names(dead)} died and the others wait for it")
    cycle = _cycle(waits)
    if cycle:
        names = " -> ".join([*cycle, cycle[0]])
        return _result(waits, [waits[name].record for name in cycle], f"they wait for each other: {names}")
    leaves = [wait for wait in waits.values() if not wait.idle and not wait.on]
    waited_for = {name for wait in waits.values() for name in wait.on}
    idle = [
        wait for wait in waits.values() if wait.idle and wait.record.name in waited_for
    ]  # it did not receive the work
    blamed = [wait for wait in leaves if wait.record.name in waited_for] or leaves or idle
    if not blamed:
        return _result(waits, [], "every process is idle: the work was lost in transfer")
    in_collective = [wait for wait in blamed if _collective(wait, stacks)]
    if in_collective and len(in_collective) == len(blamed) and len(in_collective) > 1:
        return _out_of_step(waits, [wait.record for wait in in_collective], stacks)
    culprits = [wait.record for wait in blamed]
    how = "; ".join(f"{wait.record.name} {wait.how}" for wait in blamed)
    return _result(waits, culprits, how)


def main_frame(record: Record, stacks: Mapping[int, ThreadStacks]) -> Frame | None:
    """Return the most informative frame: the innermost outside of the libraries, else the innermost."""
    thread_stacks = stacks.get(record.pid)
    if thread_stacks is None or not thread_stacks.frames:
        return None
    user_frames = [frame for frame in thread_stacks.frames if not any(part in frame.file for part in _LIBRARY)]
    return user_frames[0] if user_frames else thread_stacks.frames[0]


def _wait(record: Record, records: Sequence[Record], stacks: Mapping[int, ThreadStacks]) -> Wait:
    if not record.is_alive():
        return Wait(record, (), f"died in '{record.stage}'", dead=True)
    if not record.spans:
        thread_stacks = stacks.get(record.pid)
        problem = f" ({thread_stacks.problem})" if thread_stacks is not None and thread_stacks.problem else ""
        return Wait(record, (), f"has no work{problem}", idle=True)
    span = record.spans[-1]
    if span.waits:
        on = _resolve(span.waits_on, records)
        missing = [name for name in span.waits_on if not any(r.name == name or r.role == name for r in records)]
        how = f"waits for {span.what}"
        if missing:
            how += f" from {', '.join(missing)}, which does not exist"
        return Wait(record, on, how)
    collective = stacks[record.pid].collective if record.pid in stacks else None
    if collective is not None:
        peers = [
            other.name
            for other in records
            if other.role == record.role
            and other.pid != record.pid
            and (other.pid not in stacks or stacks[other.pid].collective is None)
        ]
        return Wait(record, tuple(peers), f"waits in {collective} of torch.distributed")
    where = main_frame(record, stacks)
    state = f"is at {where}" if where else "makes no progress"
    thread_stacks = stacks.get(record.pid)
    if thread_stacks is not None and thread_stacks.problem:
        state += f" ({thread_stacks.problem})"
    return Wait(record, (), state)


def _resolve(names: Sequence[str], records: Sequence[Record]) -> tuple[str, ...]:
    """Replace names of roles by names of their processes; those with work, if there are any."""
    resolved: list[str] = []
    for name in names:
        matching = [record.name for record in records if record.name == name]
        of_role = [record for record in records if record.role == name]
        busy = [record.name for record in of_role if record.spans or not record.is_alive()]
        resolved += matching or busy or [record.name for record in of_role]
    return tuple(dict.fromkeys(resolved))


def _cycle(waits: Mapping[str, Wait]) -> list[str]:
    """Return the names of processes that wait for each other in a cycle; empty without a cycle."""
    finished: set[str] = set()
    for start in waits:
        path: list[str] = []
        cycle = _ring_from(start, waits, path, finished)
        if cycle:
            return cycle
    return []


def _ring_from(name: str, waits: Mapping[str, Wait], path: list[str], finished: set[str]) -> list[str]:
    if name in path:
        return path[path.index(name) :]
    if name in finished:
        return []
    path.append(name)
    for waited_for in waits[name].on:
        cycle = _ring_from(waited_for, waits, path, finished)
        if cycle:
            return cycle
    path.pop()
    finished.add(name)
    return []


def _collective(wait: Wait, stacks: Mapping[int, ThreadStacks]) -> bool:
    thread_stacks = stacks.get(wait.record.pid)
    return thread_stacks is not None and thread_stacks.collective is not None


def _out_of_step(waits: Mapping[str, Wait], records: Sequence[Record], stacks: Mapping[int, ThreadStacks]) -> Diagnosis:
    """Diagnose ranks that all wait in a collective: those that are late, or in another collective than most."""
    functions = {record.pid: stacks[record.pid].collective or "" for record in records}
    counts = list(functions.values())
    usual = max(set(counts), key=counts.count)
    odd = [record for record in records if functions[record.pid] != usual]
    listed = ", ".join(f"{record.name} in {functions[record.pid]}" for record in records)
    if odd:
        return _result(waits, odd, f"the ranks wait in different collectives: {listed}")
    behind = min(record.ticks for record in records)
    late = [record for record in records if record.ticks == behind]
    if len(late) < len(records):
        return _result(waits, late, f"all ranks wait in {usual}, and {_names(late)} made the least progress")
    return _result(
        waits, records, f"all ranks wait in {usual}: their tensors or groups do not match, or the network failed"
    )


def _result(waits: Mapping[str, Wait], culprits: Sequence[Record], reason: str) -> Diagnosis:
    return Diagnosis(tuple(waits.values()), tuple(culprits), reason)


def _names(records: Sequence[Record]) -> str:
    return ", ".join(record.name for record in records)


def stacks_of(records: Sequence[Record]) -> dict[int, ThreadStacks]:
    """Return the stacks of the processes that are alive on this machine, by pid."""
    local = [record for record in records if record.is_here() and record.is_alive()]
    return collect(
        {record.pid: record.stacks_file for record in local}, {record.pid: record.thread for record in local}
    )


def examine(records: Sequence[Record], *, seconds: float, limit: float) -> tuple[Diagnosis, str, str]:
    """Request the stacks of all processes and diagnose the hang.

    Args:
        records: records of all processes of the run.
        seconds: seconds without any progress.
        limit: trainer.watchdog_seconds.

    Returns:
        The diagnosis, a summary to show, and the whole report to store.
    """
    stacks = stacks_of(records)
    diagnosis = diagnose(records, stacks)
    head = _head(diagnosis, stacks, seconds, limit)
    return diagnosis, head, "\n".join([head, "", *_all_stacks(records, stacks)])


def graph(diagnosis: Diagnosis) -> list[str]:
    """Return one line per process: its activity, what it waits for, and since when."""
    now, lines = time.time(), []
    width = max((len(wait.record.name) for wait in diagnosis.waits), default=0)
    for wait in diagnosis.waits:
        mark = "*" if wait.record in diagnosis.culprits else " "
        on = f" -> {', '.join(wait.on)}" if wait.on else ""
        moved = f"{max(0.0, now - wait.record.moved):.0f} s"
        lines.append(f" {mark} {wait.record.name:<{width}}  [{wait.record.stage}] {wait.how}{on}, for {moved}")
    return lines


def _head(diagnosis: Diagnosis, stacks: Mapping[int, ThreadStacks], seconds: float, limit: float) -> str:
    lines = [f"HANG: no process made progress for {seconds:.0f} s (trainer.watchdog_seconds={limit:g})"]
    for record in diagnosis.culprits:
        lines.append(f"Culprit: {record.name} (pid {record.pid} on {record.host}), in '{record.stage}'")
    lines += [f"Why: {diagnosis.reason}", "", "Waits (* the culprit):", *graph(diagnosis)]
    for record in diagnosis.culprits:
        if (thread_stacks := stacks.get(record.pid)) and thread_stacks.frames:
            lines += ["", f"Stack of {record.name} (most recent call first):"]
            lines += [f"    {frame}" for frame in thread_stacks.frames[:12]]
    return "\n".join(lines)


def _all_stacks(records: Sequence[Record], stacks: Mapping[int, ThreadStacks]) -> list[str]:
    lines = []
    for record in records:
        thread_stacks = stacks.get(record.pid)
        lines.append(f"--- stacks of {record.name} (pid {record.pid} on {record.host})")
        if thread_stacks is None:
            lines.append("not available: " + ("it is dead" if not record.is_alive() else f"it runs on {record.host}"))
        elif thread_stacks.text:
            lines.append(
                thread_stacks.text.replace(f"{record.thread:#018x}", f"{record.thread:#018x} [{record.stage}]").rstrip()
            )
        else:
            lines.append(f"not available: {thread_stacks.problem}")
        lines.append("")
    return lines


REPORTS = "hangs"
_STDIN = 0
ANSWER_TIME = 5.0
"""Seconds in which a driver with a running interpreter reads a report."""
RECOVERY_TIME = 120.0
"""Seconds in which a driver that has read a report restarts workers, or ends."""


class Watcher:
    """Watch one run until its driver says goodbye or is gone."""

    def __init__(self, watched: Watched) -> None:
        self.run, self.seconds, self.driver = Path(watched.run), watched.seconds, watched.driver
        self._born = watched.born
        self._oom_kills = oom_kills()
        self._poll = min(1.0, self.seconds / 10)
        self._seen: dict[int, tuple[object, ...]] = {}
        self._moved = time.monotonic()
        self._last_stage = ""
        self._heard = b""

    def watch(self) -> None:
        """Check once per second."""
        while True:
            word = self._next_word(self._poll)
            if word == "bye":
                return
            if word == "" or birth(self.driver) != self._born:
                self._driver_gone()
                return
            records = read_records(self.run / FOLDER)
            quiet = self._quiet_for(records)
            if quiet > self._limit(records) and not self._report_hang(records, quiet):
                return

    def _next_word(self, seconds: float) -> str | None:
        """Return the driver's next word; None if there is none, "" if it closed the pipe."""
        deadline = time.monotonic() + seconds
        while b"\n" not in self._heard:
            ready, _, _ = select.select([_STDIN], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            read = os.read(_STDIN, 4096)
            if not read:
                return ""
            self._heard += read
        word, _, self._heard = self._heard.partition(b"\n")
        return word.decode()

    def _quiet_for(self, records: Sequence[Record]) -> float:
        """Return the seconds since the last progress.

        A driver that publishes nothing yet, that the user has stopped, or that a debugger holds, does not count.
        """
        progress: dict[int, tuple[object, ...]] = {record.pid: (record.ticks, record.spans) for record in records}
        stage = next((record.stage for record in records if record.pid == self.driver and record.spans), "")
        if progress != self._seen or not stage or _is_held(self.driver):
            self._seen, self._moved = progress, time.monotonic()
        self._last_stage = stage or self._last_stage
        return time.monotonic() - self._moved

    def _limit(self, records: Sequence[Record]) -> float:
        """Return the limit in seconds: the watchdog's, or that of a process whose activity has a longer one."""
        span_limits = [
            span.limit for record in records if record.is_alive() for span in record.spans if span.limit is not None
        ]
        return max([self.seconds, *(limit + self._poll for limit in span_limits)])

    # a hang ----------------------------------------------------------------------------------------------------------

    def _report_hang(self, records: Sequence[Record], quiet: float) -> bool:
        """Report a hang; return whether the run continues."""
        diagnosis, summary, report = examine(records, seconds=quiet, limit=self.seconds)
        resume = self._resume_hint()
        report = self._write_report(f"{report}\n{resume}\n")
        _print(f"{summary}\n\nAll stacks: {report}\n{resume}")
        culprits = [{"name": r.name, "pid": r.pid, "host": r.host} for r in diagnosis.culprits]
        message = {"report": report, "summary": summary, "reason": diagnosis.reason, "culprits": culprits}
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()
        if self._next_word(ANSWER_TIME) == "taken" and self._next_word(RECOVERY_TIME) == "on":
            self._seen = {}
            return True
        if birth(self.driver) == self._born:
            try:  # first, so that it is recorded before the process ends
                record_end(self.run, self.driver, f"hang: {diagnosis.reason}; see {report}")
            finally:  # a full disk must not keep a hanging run alive
                self._kill(diagnosis.culprits)
        return False

    def _write_report(self, text: str) -> str:
        """Write the report and return its place; without disk space it is shown instead, and the hang still ends."""
        folder = self.run / REPORTS
        try:
            with disk_errors(folder):
                folder.mkdir(exist_ok=True)
                path = folder / f"hang_{len(list(folder.glob('hang_*.txt'))) + 1}.txt"
                path.write_text(text, encoding="utf-8")
        except (HoneError, OSError) as error:
            _print(f"{text}\n{error}")
            return "the output of the run (it could not be written)"
        return str(path)

    def _resume_hint(self) -> str:
        steps = sorted(
            int(path.name[5:]) for path in (self.run / "checkpoints").glob("step_*") if path.name[5:].isdigit()
        )
        if steps:
            return (
                f"Run the same command again to resume from step {steps[-1]} ({self.run}/checkpoints/step_{steps[-1]})."
            )
        return "There is no checkpoint yet: the same command starts from step 0. trainer.save_freq=<k> saves every k steps."

    def _kill(self, culprits: Sequence[Record]) -> None:
        """Kill a driver that does not answer, and the processes it was waiting for."""
        for record in culprits:
            if record.is_here() and record.is_alive():
                os.kill(record.pid, signal.SIGKILL)
        if birth(self.driver) == self._born:
            os.kill(self.driver, signal.SIGKILL)

    # a dead driver ---------------------------------------------------------------------------------------------------

    def _driver_gone(self) -> None:
        """Report how the driver ended, if no other process can."""
        deadline = time.monotonic() + 2.0
        while birth(self.driver) == self._born and time.monotonic() < deadline:
            time.sleep(0.01)
        if birth(self.driver) == self._born:
            return  # it closed the pipe and lives: it asked to stop watching
        cause = "killed by the kernel, which was out of memory" if oom_kills() > self._oom_kills else "killed"
        reason = f"the process {self.driver} was {cause}"
        if self._last_stage:
            reason += f", in '{self._last_stage}'"
        if record_end(self.run, self.driver, reason):
            _print(f"{reason}\n{self._resume_hint()}")


def _is_held(pid: int) -> bool:
    """Return whether the user has stopped a process, or a debugger holds it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    return fields["State"][0] in "Tt" or fields.get("TracerPid", "0").strip() != "0"


def _print(text: str) -> None:
    sys.stderr.write("\n" + "".join(f"watchdog: {line}\n" if line else "watchdog:\n" for line in text.splitlines()))
    sys.stderr.flush()


def main() -> None:
    """Watch the run of the one argument, a JSON object."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Watcher(Watched(**json.loads(sys.argv[1]))).watch()


if __name__ == "__main__":
    main()
