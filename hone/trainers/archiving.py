"""Choice of the sequences that the rollout archive receives in a step.

A step is archived whole (``trainer.rollout_dump_freq``, ``trainer.rollout_dump_steps``), or only the prompts that are followed through
training (``trainer.rollout_dump_share``). Sequences that were not trained on are archived with their fate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from hone.cluster.handles import AnyBatch, Work, concat_batches
from hone.config.run import TrainerConfig
from hone.data.prompts import PromptDataset
from hone.data.types import row_of

TRAINED = "trained"
"""Fate of the rows of a step's batch."""
_SEARCHED = 1000
"""Rows of the dataset among which at least one prompt is followed."""


class Archiving:
    """Driver's part of the rollout archive: it chooses rows, and the batch ops write them.

    Args:
        config: block ``trainer``.
        work: role that holds the columns.
    """

    def __init__(self, config: TrainerConfig, dataset: PromptDataset, work: Work) -> None:
        self._freq = config.rollout_dump_freq
        self._steps = frozenset((*config.rollout_dump_steps, *config.save_steps_for_replay))
        self._work, self._left_out = work, list[tuple[AnyBatch, str]]()
        self._bound = 0.0
        if config.rollout_dump_share:
            searched = range(min(_SEARCHED, len(dataset)))
            self._bound = max(config.rollout_dump_share, min(place(dataset[row].uid) for row in searched))

    @property
    def writes(self) -> bool:
        """True if the run has an archive of its training."""
        return bool(self._freq or self._steps or self._bound)

    def whole(self, step: int) -> bool:
        """Return whether all sequences of a step are archived."""
        by_frequency = self._freq > 0 and (step == 1 or step % self._freq == 0)
        return by_frequency or step in self._steps

    def follows(self, uid: str) -> bool:
        """Return whether the prompt of a group is archived at every step."""
        return self._bound > 0 and place(uid) <= self._bound

    def leave_out(self, batch: AnyBatch, fate: str) -> None:
        """Keep sequences that are not trained on until the step is written."""
        if self.writes:
            self._left_out.append((batch, fate))

    async def begin(self) -> None:
        """Write the vocabulary."""
        if self.writes:
            await self._work.write_vocabulary()

    async def write(self, step: int, batch: AnyBatch) -> None:
        """Begin to write the sequences of a step; they are in the file once :meth:`wait` returns.

        Raises:
            HoneError: the file before could not be written.
        """
        left_out, self._left_out = self._left_out, []
        parts = [(batch, TRAINED), *left_out]
        chosen = [(self._chosen(part, step), fate) for part, fate in parts]
        trained, *others = [(part, fate) for part, fate in chosen]
        rest = [(part, fate) for part, fate in others if len(part)]
        if not len(trained[0]) and not rest:
            return
        fates = [fate for part, fate in rest for _ in range(len(part))]
        await self._work.write_rollouts(
            trained[0] if len(trained[0]) else None,
            _joined([part for part, _ in rest]),
            step,
            fates=fates,
            rows=sum(len(part) for part, _ in parts),
        )

    async def wait(self) -> None:
        """Wait until the last file is written.

        Raises:
            HoneError: it could not be written.
        """
        if self.writes:
            await self._work.wait_for_archive()

    def _chosen(self, batch: AnyBatch, step: int) -> AnyBatch:
        if self.whole(step):
            return batch
        return batch.reorder([row for row, uid in enumerate(batch.uids) if self.follows(uid)])


def place(uid: str) -> float:
    """Return the place of a dataset row in 0..1, which follows from its uid alone: runs on the same data follow the same prompts.

    >>> round(place("train:17"), 4) == round(place("train:17~2"), 4)
    True
    """
    digest = hashlib.blake2b(row_of(uid).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _joined(batches: Sequence[AnyBatch]) -> AnyBatch | None:
    """Return the rows of all batches with the columns that they share."""
    if not batches:
        return None
    shared = [name for name in batches[0].names() if all(name in batch for batch in batches)]
    return concat_batches([batch.select(*shared) for batch in batches])
