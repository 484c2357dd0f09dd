"""The staleness bound holds whatever rollout and learner do, and batches come in order of admission."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.examples import examples
from support.messages import raises

from hone.data.batch import Batch
from hone.data.types import Sample
from hone.trainers.rollouter import GroupBuffer


def sample(uid: str) -> Sample:
    return Sample(uid=uid, prompt_ids=[1], messages=None, data_source="x")


def rows(uid: str) -> Batch:
    return Batch({"uid": [uid, uid], "index": [0, 1]})


class Turns(RuleBasedStateMachine):
    """A rollouter that is as greedy as it may be, and a learner that trains whenever a batch is ready."""

    bound = 0
    per_batch = 3

    def __init__(self) -> None:
        super().__init__()
        self.buffer = GroupBuffer(self.per_batch, self.bound)
        self.version = self.admitted = 0
        self.open: list[str] = []
        self.admitted_at: dict[str, int] = {}
        self.expected: list[str] = []
        self.taken: list[str] = []

    @precondition(lambda self: self.buffer.free_slots > 0)
    @rule(data=st.data())
    def admit(self, data):
        count = data.draw(st.integers(1, self.buffer.free_slots))
        uids = [f"g{self.admitted + number}" for number in range(count)]
        self.buffer.admit(uids)
        self.admitted += count
        self.open += uids
        self.expected += uids
        self.admitted_at |= dict.fromkeys(uids, self.version)

    @rule()
    def admit_too_many(self):
        with raises(ValueError, self.buffer.free_slots + 1, self.buffer.free_slots):
            self.buffer.admit([f"x{number}" for number in range(self.buffer.free_slots + 1)])

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def finish(self, data):
        uid = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.buffer.put(sample(uid), rows(uid))

    @precondition(lambda self: self.buffer.ready)
    @rule()
    def take(self):
        groups = self.buffer.take()
        self.taken = [group.uid for group in groups]
        assert self.taken == self.expected[: self.per_batch]
        self.expected = self.expected[self.per_batch :]
        for group in groups:
            assert group.batch.uids == [group.uid, group.uid]
            assert group.version == self.admitted_at[group.uid]
            assert self.buffer.staleness(group) == self.version - group.version <= self.bound

    @precondition(lambda self: self.taken)
    @rule()
    def release(self):
        self.version += 1
        self.buffer.release(self.version)
        self.taken = []

    @invariant()
    def slots_are_counted(self):
        inside = len(self.expected) + len(self.taken)
        assert self.buffer.free_slots == (self.bound + 1) * self.per_batch - inside >= 0

    @invariant()
    def ready_exactly_when_the_oldest_are_finished(self):
        head = self.expected[: self.per_batch]
        complete = len(head) == self.per_batch and not set(head) & set(self.open)
        assert self.buffer.ready == (complete and not self.taken)
        if not self.buffer.ready:
            with pytest.raises(RuntimeError):
                self.buffer.take()


def with_bound(bound: int):
    machine = type(f"Turns{bound}", (Turns,), {"bound": bound})
    case = machine.TestCase
    case.settings = examples(40, stateful_step_count=40)
    return case


TestBound0 = with_bound(0)
TestBound1 = with_bound(1)
TestBound2 = with_bound(2)


def test_the_bound_is_reached_by_a_greedy_rollouter():
    buffer = GroupBuffer(1, 2)
    seen = []
    for step in range(1, 6):
        names = [f"{step}.{number}" for number in range(buffer.free_slots)]
        buffer.admit(names)
        for name in names:
            buffer.put(sample(name), rows(name))
        (group,) = buffer.take()
        seen.append(buffer.staleness(group))
        buffer.release(step)
    assert seen == [0, 1, 2, 2, 2]


def test_ready_first_leaves_no_more_old_groups_than_later_batches_have_space_for():
    buffer = GroupBuffer(1, 2, ready_first=True)
    buffer.admit(["a", "b", "c"])
    buffer.put(sample("a"), rows("a"))
    assert [group.uid for group in buffer.take()] == ["a"]
    buffer.release(1)
    buffer.admit(["d"])
    buffer.put(sample("d"), rows("d"))
    assert not buffer.ready, "b or c must be next: both are due at version 2, and a batch has one group"
    buffer.put(sample("c"), rows("c"))
    assert [group.uid for group in buffer.take()] == ["c"]


def test_errors():
    with raises(ValueError, "groups_per_batch"):
        GroupBuffer(0)
    with raises(ValueError, "max_staleness"):
        GroupBuffer(1, -1)
    buffer = GroupBuffer(2, 1)
    buffer.admit(["a"])
    for twice in (["a"], ["b", "b"]):
        with raises(ValueError, twice[-1]):
            buffer.admit(twice)
    assert buffer.free_slots == 3, "nothing of a refused call is admitted"
    with raises(KeyError, "b"):
        buffer.put(sample("b"), rows("b"))
    buffer.put(sample("a"), rows("a"))
    with raises(ValueError, "a", "finished"):
        buffer.put(sample("a"), rows("a"))
