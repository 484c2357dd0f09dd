"""Buffer between rollout and learner, which bounds the staleness of trained groups.

    Rollouter --groups--> GroupBuffer --ready batch--> Learner --weights v+1--> engines
       ^  admits a prompt group only while a slot is free                |
       +----------------- slots released after the weight update <-------+

A group holds a slot from its admission until the weight update that trains on it. There are ``(max_staleness + 1) x
groups_per_batch`` slots, so at most ``max_staleness`` updates happen between a group's admission and its training. With bound 0,
rollout and learner alternate strictly: synchronous training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hone.cluster.any_batch import AnyBatch
from hone.data.types import Sample


@dataclass(frozen=True)
class Group:
    """Group of all episodes of one prompt.

    Attributes:
        sample: row of the prompt.
        version: weight version at admission.
        batch: one row per episode, or references to rows on a cluster.
    """

    sample: Sample
    version: int
    batch: AnyBatch

    @property
    def uid(self) -> str:
        """Uid of the prompt."""
        return self.sample.uid


class GroupBuffer:
    """Buffer that admits prompt groups, collects finished ones, and returns batches.

    In order of admission, early batches are not biased to short responses and runs are reproducible. With ``ready_first`` a batch has
    the groups that must be in it so that no later batch exceeds the bound, then those that finished first.

    Args:
        groups_per_batch: prompts per step.
        max_staleness: weight updates allowed between a group's admission and its training.
        ready_first: take finished groups before those that were admitted earlier.
    """

    def __init__(self, groups_per_batch: int, max_staleness: int = 0, *, ready_first: bool = False) -> None:
        if groups_per_batch < 1 or max_staleness < 0:
            raise ValueError("groups_per_batch must be at least 1 and max_staleness at least 0")
        self.groups_per_batch, self.max_staleness, self.ready_first = groups_per_batch, max_staleness, ready_first
        self.version = 0
        """Version of the current weights."""
        self._waiting: dict[str, None] = {}  # in order of admission
        self._admitted_at: dict[str, int] = {}
        self._finished: dict[str, Group] = {}  # in order of completion
        self._training: list[str] = []

    @property
    def free_slots(self) -> int:
        """Number of groups that can be admitted now."""
        used = len(self._waiting) + len(self._training)
        return (self.max_staleness + 1) * self.groups_per_batch - used

    @property
    def waiting(self) -> int:
        """Number of admitted groups that are not taken yet."""
        return len(self._waiting)

    def __contains__(self, uid: object) -> bool:
        return uid in self._admitted_at

    @property
    def playing(self) -> list[str]:
        """Uids of admitted groups that have not finished, in order of admission."""
        return [uid for uid in self._waiting if uid not in self._finished]

    @property
    def ready(self) -> bool:
        """True if the next batch is complete."""
        head = self._next()
        return not self._training and len(head) == self.groups_per_batch and all(uid in self._finished for uid in head)

    def _next(self) -> list[str]:
        """Return the uids of the next batch; in part if it is not complete."""
        if not self.ready_first:
            return list(self._waiting)[: self.groups_per_batch]
        unfinished = [uid for uid in self._waiting if uid not in self._finished]
        by_readiness, batch = [*self._finished, *unfinished], dict[str, None]()
        for later in range(self.max_staleness + 1):  # the next `later` batches have space for as many of these groups
            oldest = self.version + later - self.max_staleness
            due = {uid for uid in self._waiting if self._admitted_at[uid] <= oldest}
            missing = len(due) - later * self.groups_per_batch - len(due & batch.keys())
            candidates = [uid for uid in by_readiness if uid in due and uid not in batch]
            batch |= dict.fromkeys(candidates[: max(0, missing)])
        return [*batch, *(uid for uid in self._finished if uid not in batch)][: self.groups_per_batch]

    def admit(self, uids: Sequence[str]) -> None:
        """Give each group a slot.

        Raises:
            ValueError: not enough free slots, or a uid is already in the buffer; then none is admitted.
        """
        if len(uids) > self.free_slots:
            raise ValueError(f"{len(uids)} groups for {self.free_slots} free slots")
        duplicates = [uid for index, uid in enumerate(uids) if uid in self._admitted_at or uid in uids[:index]]
        if duplicates:
            raise ValueError(f"group '{duplicates[0]}' is already in the buffer")
        for uid in uids:
            self._waiting[uid] = None
            self._admitted_at[uid] = self.version

    def put(self, sample: Sample, batch: AnyBatch) -> Group:
        """Store the finished group of a prompt.

        Raises:
            KeyError: the group was not admitted.
            ValueError: the group has already finished.
        """
        uid = sample.uid
        if uid not in self._admitted_at:
            raise KeyError(f"group '{uid}' was not admitted")
        if uid in self._finished or uid in self._training:
            raise ValueError(f"group '{uid}' has already finished")
        self._finished[uid] = Group(sample, self._admitted_at[uid], batch)
        return self._finished[uid]

    def evict(self, uid: str) -> None:
        """Remove a finished group and free its slot.

        Raises:
            KeyError: there is no finished group with this uid.
        """
        if uid not in self._finished:
            raise KeyError(f"group '{uid}' is not a finished group of the buffer")
        del self._finished[uid], self._admitted_at[uid], self._waiting[uid]

    def take(self) -> list[Group]:
        """Return the next batch; its slots stay occupied until :meth:`release`.

        Raises:
            RuntimeError: no batch is ready.
        """
        if not self.ready:
            raise RuntimeError("no batch is ready")
        self._training = self._next()
        for uid in self._training:
            del self._waiting[uid]
        return [self._finished.pop(uid) for uid in self._training]

    def withdraw(self, uid: str) -> None:
        """Remove a group from the taken batch and free its slot.

        Raises:
            KeyError: the group is not in the taken batch.
        """
        if uid not in self._training:
            raise KeyError(f"group '{uid}' is not in the taken batch")
        self._training.remove(uid)
        del self._admitted_at[uid]

    def part_ready(self, count: int) -> bool:
        """Return whether the first ``count`` groups that are not taken yet have finished (``ready_first``: any of them)."""
        return len(self._part(count)) == count

    def take_part(self, count: int) -> list[Group]:
        """Return ``count`` groups of the next batch before it is complete.

        Raises:
            RuntimeError: they are not ready.
        """
        part = self._part(count)
        if len(part) < count:
            raise RuntimeError(f"{len(part)} of {count} groups are ready")
        self._training += part
        for uid in part:
            del self._waiting[uid]
        return [self._finished.pop(uid) for uid in part]

    def _part(self, count: int) -> list[str]:
        candidates = self._finished if self.ready_first else list(self._waiting)[:count]
        return [uid for uid in candidates if uid in self._finished][:count]

    def staleness(self, group: Group) -> int:
        """Return the number of weight updates since the group was admitted."""
        return self.version - group.version

    def release(self, version: int) -> None:
        """Free the slots of the taken batch after the weight update to ``version``."""
        self.version = version
        for uid in self._training:
            del self._admitted_at[uid]
        self._training = []

    def open_groups(self) -> list[tuple[str, int, Group | None]]:
        """Return uid, version at admission and finished group (or None) of every group to train, in order of admission."""
        return [(uid, self._admitted_at[uid], self._finished.get(uid)) for uid in self._waiting]

    def readmit(self, uid: str, version: int) -> None:
        """Admit a group of a resumed run, as of the given version.

        Raises:
            ValueError: see :meth:`admit`.
        """
        self.admit([uid])
        self._admitted_at[uid] = version
