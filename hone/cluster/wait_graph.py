"""Who waits for whom when a run stands still, and who is to blame.

A process waits for another because it said so (:func:`hone.insight.activity.waiting`), or because its stack stands in a
collective of torch.distributed: then it waits for those of its role that do not. The culprit is whom all others wait for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hone.insight.activity import Record
from hone.insight.stacks import Frame, Stacks

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
    """What one process is held up by.

    Attributes:
        record: the process.
        on: names of the processes that it waits for; empty when it waits for none of the run.
        how: in words.
        idle: whether it has nothing to do.
        dead: whether it is gone without having said goodbye.
    """

    record: Record
    on: tuple[str, ...]
    how: str
    idle: bool = False
    dead: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Why nothing moves.

    Attributes:
        waits: of every process, in the order of their names.
        culprits: those on whom the others wait.
        reason: in one sentence.
    """

    waits: tuple[Wait, ...]
    culprits: tuple[Record, ...]
    reason: str


def diagnose(records: Sequence[Record], stacks: Mapping[int, Stacks]) -> Diagnosis:
    """Find whom everyone waits for.

    Args:
        records: of all processes of the run.
        stacks: of those that could be asked, by pid.
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
    wanted = {name for wait in waits.values() for name in wait.on}
    idle = [wait for wait in waits.values() if wait.idle and wait.record.name in wanted]  # it has not heard of the work
    blamed = [wait for wait in leaves if wait.record.name in wanted] or leaves or idle
    if not blamed:
        return _result(waits, [], "every process is idle: the work was lost on its way")
    together = [wait for wait in blamed if _collective(wait, stacks)]
    if together and len(together) == len(blamed) and len(together) > 1:
        return _out_of_step(waits, [wait.record for wait in together], stacks)
    culprits = [wait.record for wait in blamed]
    how = "; ".join(f"{wait.record.name} {wait.how}" for wait in blamed)
    return _result(waits, culprits, how)


def place(record: Record, stacks: Mapping[int, Stacks]) -> Frame | None:
    """The frame that says most: the innermost outside of the libraries, else the innermost."""
    known = stacks.get(record.pid)
    if known is None or not known.frames:
        return None
    own = [frame for frame in known.frames if not any(part in frame.file for part in _LIBRARY)]
    return own[0] if own else known.frames[0]


def _wait(record: Record, records: Sequence[Record], stacks: Mapping[int, Stacks]) -> Wait:
    if not record.is_alive():
        return Wait(record, (), f"died in '{record.stage}'", dead=True)
    if not record.spans:
        known = stacks.get(record.pid)
        said = f" ({known.problem})" if known is not None and known.problem else ""
        return Wait(record, (), f"has nothing to do{said}", idle=True)
    span = record.spans[-1]
    if span.waits:
        on = _resolve(span.waits_on, records)
        missing = [name for name in span.waits_on if not any(r.name == name or r.role == name for r in records)]
        how = f"waits for {span.what}"
        if missing:
            how += f" from {', '.join(missing)}, which is not there"
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
    where = place(record, stacks)
    at = f"stands at {where}" if where else "does not move"
    known = stacks.get(record.pid)
    if known is not None and known.problem:
        at += f" ({known.problem})"
    return Wait(record, (), at)


def _resolve(names: Sequence[str], records: Sequence[Record]) -> tuple[str, ...]:
    """Names of processes and of roles as names of processes; of a role only those with something to do, if there are any."""
    found: list[str] = []
    for name in names:
        exact = [record.name for record in records if record.name == name]
        playing = [record for record in records if record.role == name]
        held_up = [record.name for record in playing if record.spans or not record.is_alive()]
        found += exact or held_up or [record.name for record in playing]
    return tuple(dict.fromkeys(found))


def _cycle(waits: Mapping[str, Wait]) -> list[str]:
    """Names of processes that wait for each other in a ring; empty when there is no ring."""
    done: set[str] = set()
    for start in waits:
        path: list[str] = []
        found = _ring_from(start, waits, path, done)
        if found:
            return found
    return []


def _ring_from(name: str, waits: Mapping[str, Wait], path: list[str], done: set[str]) -> list[str]:
    if name in path:
        return path[path.index(name) :]
    if name in done:
        return []
    path.append(name)
    for other in waits[name].on:
        found = _ring_from(other, waits, path, done)
        if found:
            return found
    path.pop()
    done.add(name)
    return []


def _collective(wait: Wait, stacks: Mapping[int, Stacks]) -> bool:
    known = stacks.get(wait.record.pid)
    return known is not None and known.collective is not None


def _out_of_step(waits: Mapping[str, Wait], records: Sequence[Record], stacks: Mapping[int, Stacks]) -> Diagnosis:
    """All ranks wait in a collective: the ones that are behind, or in another collective than most, are out of step."""
    functions = {record.pid: stacks[record.pid].collective or "" for record in records}
    counts = list(functions.values())
    usual = max(set(counts), key=counts.count)
    odd = [record for record in records if functions[record.pid] != usual]
    said = ", ".join(f"{record.name} in {functions[record.pid]}" for record in records)
    if odd:
        return _result(waits, odd, f"the ranks wait in different collectives: {said}")
    behind = min(record.ticks for record in records)
    late = [record for record in records if record.ticks == behind]
    if len(late) < len(records):
        return _result(waits, late, f"all ranks wait in {usual}, and {_names(late)} has done least")
    return _result(
        waits, records, f"all ranks wait in {usual}: their tensors or groups do not match, or the network fails"
    )


def _result(waits: Mapping[str, Wait], culprits: Sequence[Record], reason: str) -> Diagnosis:
    return Diagnosis(tuple(waits.values()), tuple(culprits), reason)


def _names(records: Sequence[Record]) -> str:
    return ", ".join(record.name for record in records)
