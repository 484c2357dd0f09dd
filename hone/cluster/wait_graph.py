"""Wait graph of a run without progress, and its culprit.

A process waits for another because it published that (:func:`hone.insight.activity.waiting`), or because its stack is in a
collective of torch.distributed: then it waits for those of its role that are not. All others wait for the culprit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hone.insight.activity import Record
from hone.insight.stacks import Frame, ThreadStacks

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
