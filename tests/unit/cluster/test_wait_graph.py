"""Whom a report of a hang blames."""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.cluster.watcher import diagnose
from hone.insight.activity import Record, Span
from hone.insight.stacks import Frame, ThreadStacks

ALL_REDUCE = (Frame("/site-packages/torch/distributed/distributed_c10d.py", 1, "all_reduce"),)
BARRIER = (Frame("/site-packages/torch/distributed/distributed_c10d.py", 2, "barrier"),)
OWN = (Frame("/home/me/reward.py", 12, "compute_score"),)


def record(
    role: str, rank: int | None = None, *, doing: str = "", on: tuple = (), waits: bool = False, **other
) -> Record:
    spans = (Span(doing, 0.0, on, None, waits or bool(on)),) if doing else ()
    pid = hash((role, rank)) % 10**6 + 10**7  # none of this machine
    fields = {"host": "elsewhere", "born": 0, "ticks": 5, **other}
    return Record(role, rank, fields.pop("pid", pid), spans=spans, path=Path(f"{role}{rank}"), **fields)


def blamed(*records: Record, stacks: dict | None = None) -> tuple[list[str], str]:
    by_pid = {r.pid: ThreadStacks("", (stacks or {}).get(r.name, ())) for r in records}
    diagnosis = diagnose(records, by_pid)
    return [culprit.name for culprit in diagnosis.culprits], diagnosis.reason


def test_the_rank_that_is_not_in_the_collective():
    names, reason = blamed(
        record("driver", doing="update_actor", on=("actor",)),
        record("actor", 0, doing="update_actor"),
        record("actor", 1, doing="update_actor"),
        record("rollout", 0),
        stacks={"actor[0]": ALL_REDUCE, "actor[1]": OWN},
    )
    assert names == ["actor[1]"] and "reward.py:12 in compute_score" in reason


def test_a_rank_in_another_collective_than_most():
    ranks = [record("actor", rank, doing="update_actor") for rank in range(3)]
    names, reason = blamed(*ranks, stacks={"actor[0]": ALL_REDUCE, "actor[1]": BARRIER, "actor[2]": ALL_REDUCE})
    assert names == ["actor[1]"] and "actor[1] in barrier" in reason


def test_the_rank_with_the_least_progress():
    ranks = [record("actor", rank, doing="update_actor", ticks=9 - rank) for rank in range(2)]
    names, reason = blamed(*ranks, stacks=dict.fromkeys(["actor[0]", "actor[1]"], ALL_REDUCE))
    assert names == ["actor[1]"] and "all_reduce" in reason and "actor[1]" in reason


def test_the_dead_are_blamed_first():
    dead = record("reward worker", 2, doing="64 calls", host=socket.gethostname(), pid=2**22 + 1)
    names, reason = blamed(record("driver", doing="scores", on=("reward worker",)), dead)
    assert names == ["reward worker[2]"] and "reward worker[2]" in reason


def test_a_ring():
    names, reason = blamed(
        record("driver", doing="weights", on=("rollout",)),
        record("rollout", 0, doing="weights", on=("actor[0]",)),
        record("actor", 0, doing="a place in the buffer", on=("rollout[0]",)),
    )
    assert set(names) == {"rollout[0]", "actor[0]"} and "rollout[0]" in reason and "actor[0]" in reason


def test_a_rank_that_was_stopped_before_it_received_the_work():
    names, reason = blamed(
        record("driver", doing="update_actor", on=("actor",)),
        record("actor", 0, doing="update_actor"),
        record("actor", 1),
        stacks={"actor[0]": ALL_REDUCE},
    )
    assert names == ["actor[1]"] and "actor[1]" in reason


def test_the_driver_itself_and_something_outside():
    assert blamed(record("driver", doing="reward"), stacks={"driver": OWN})[0] == ["driver"]
    names, reason = blamed(record("driver", doing="an answer of the judge's server", waits=True))
    assert names == ["driver"] and "an answer of the judge's server" in reason
    names, reason = blamed(record("driver", doing="update", on=("actor[1]",)), record("actor", 0))
    assert names == ["driver"] and "actor[1]" in reason


def test_every_process_is_idle():
    names, reason = blamed(record("driver"), record("actor", 0))
    assert names == [] and "idle" in reason


@given(st.lists(st.integers(0, 7), min_size=8, max_size=8), st.data())
def test_in_any_wait_graph_the_culprits_wait_for_none_or_are_in_a_cycle(targets, data):
    """Process k waits for process targets[k], unless that is k itself: then it works."""
    records = [
        record("p", k, doing="x", on=(f"p[{target}]",) if target != k else (), pid=10**7 + k, host="elsewhere")
        for k, target in enumerate(targets)
    ]
    names, _ = blamed(*data.draw(st.permutations(records)))
    ends = set()
    for start in range(8):
        seen = [start]
        while targets[seen[-1]] not in seen:
            seen.append(targets[seen[-1]])
        ends.add(frozenset(seen[seen.index(targets[seen[-1]]) :]))
    rings = [end for end in ends if len(end) > 1]
    if rings:
        assert {f"p[{k}]" for k in next(r for r in rings if f"p[{min(r)}]" in names)} == set(names)
    else:
        workers = {k for end in ends for k in end}
        wanted = {k for k in workers if any(target == k for j, target in enumerate(targets) if j != k)} or workers
        assert set(names) == {f"p[{k}]" for k in wanted}


@pytest.mark.parametrize("role", ["driver", "actor"])
def test_the_reason_names_a_process_that_does_not_answer(role):
    stopped = record(role, doing="update_actor")
    diagnosis = diagnose([stopped], {stopped.pid: ThreadStacks("", (), "it does not answer (stopped)")})
    assert "it does not answer (stopped)" in diagnosis.reason
