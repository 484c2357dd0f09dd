"""The buffer between rollout and learner, which bounds how stale a trained group may be.

    Rollouter --groups--> GroupBuffer --ready batch--> Learner --weights v+1--> engines
       ^  admits a prompt group only while a slot is free                |
       +----------------- slots released after the weight update <-------+

A group holds a slot from its admission until the weight update that it took part in. There are
``(max_staleness + 1) x groups_per_batch`` slots: so when a group is trained on, at most ``max_staleness`` updates have
happened since it was admitted. With bound 0 rollout and learner take strict turns: synchronous training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from hone.cluster.runtime import AnyBatch
from hone.data.types import Sample


@dataclass(frozen=True)
class Group:
    """All episodes of one prompt.

    Attributes:
        sample: the prompt.
        version: weight version at admission.
        batch: a row an episode, or on a cluster the references to them.
    """

    sample: Sample
    version: int
    batch: AnyBatch

    @property
    def uid(self) -> str:
        """The prompt's."""
        return self.sample.uid


class GroupBuffer:
    """Admits prompt groups, collects finished ones, hands out batches in order of admission.

    Order of admission, not of completion: so that short responses do not crowd into early batches, and a run repeats.

    Args:
        groups_per_batch: prompts a step.
        max_staleness: weight updates that may happen between a group's admission and its training.
    """

    def __init__(self, groups_per_batch: int, max_staleness: int = 0) -> None:
        if groups_per_batch < 1 or max_staleness < 0:
            raise ValueError("groups_per_batch must be at least 1 and max_staleness at least 0")
        self.groups_per_batch, self.max_staleness = groups_per_batch, max_staleness
        self._version = 0
        self._waiting: deque[str] = deque()
        self._admitted_at: dict[str, int] = {}
        self._finished: dict[str, Group] = {}
        self._training: list[str] = []

    @property
    def free_slots(self) -> int:
        """Groups that may be admitted now."""
        used = len(self._waiting) + len(self._training)
        return (self.max_staleness + 1) * self.groups_per_batch - used

    @property
    def ready(self) -> bool:
        """Whether the next batch is complete."""
        head = list(self._waiting)[: self.groups_per_batch]
        return not self._training and len(head) == self.groups_per_batch and all(uid in self._finished for uid in head)

    def admit(self, uids: Sequence[str]) -> None:
        """Give each group a slot.

        Raises:
            ValueError: not enough free slots, or a uid is inside already; then none is admitted.
        """
        if len(uids) > self.free_slots:
            raise ValueError(f"{len(uids)} groups for {self.free_slots} free slots")
        twice = [uid for place, uid in enumerate(uids) if uid in self._admitted_at or uid in uids[:place]]
        if twice:
            raise ValueError(f"group '{twice[0]}' is in the buffer already")
        for uid in uids:
            self._waiting.append(uid)
            self._admitted_at[uid] = self._version

    def put(self, sample: Sample, batch: AnyBatch) -> Group:
        """The group of a prompt has finished.

        Raises:
            KeyError: it was never admitted.
            ValueError: it has finished before.
        """
        uid = sample.uid
        if uid not in self._admitted_at:
            raise KeyError(f"group '{uid}' was not admitted")
        if uid in self._finished or uid in self._training:
            raise ValueError(f"group '{uid}' has finished before")
        self._finished[uid] = Group(sample, self._admitted_at[uid], batch)
        return self._finished[uid]

    def evict(self, uid: str) -> None:
        """Drop a finished group; its slot is free again.

        Raises:
            KeyError: no finished group of that uid waits here.
        """
        if uid not in self._finished:
            raise KeyError(f"no finished group '{uid}' waits")
        del self._finished[uid], self._admitted_at[uid]
        self._waiting.remove(uid)

    def take(self) -> list[Group]:
        """The next batch; its slots stay taken until :meth:`release`.

        Raises:
            RuntimeError: no batch is ready.
        """
        if not self.ready:
            raise RuntimeError("no batch is ready")
        self._training = [self._waiting.popleft() for _ in range(self.groups_per_batch)]
        return [self._finished.pop(uid) for uid in self._training]

    def staleness(self, group: Group) -> int:
        """Weight updates since the group was admitted."""
        return self._version - group.version

    def release(self, version: int) -> None:
        """The weights have been updated to ``version`` with the batch taken: its slots are free again."""
        self._version = version
        for uid in self._training:
            del self._admitted_at[uid]
        self._training = []
