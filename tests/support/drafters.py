"""Drafters that know the response: always right, always wrong, and random."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from hone.generation.native.scheduler import Job
from hone.generation.native.speculative import DraftRow
from hone.generation.protocol import Completion, GenerationRequest

VOCABULARY = 61


class StubDrafter:
    """A drafter without caches: a function from prompt and sampled tokens to the next ones."""

    def __init__(self, propose: Callable[[GenerationRequest, list[int], int], list[int]]) -> None:
        self._propose, self.ended = propose, []

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        return [self._propose(row.job.request, list(row.ids), row.most) for row in rows]

    def end(self, job: Job, ids: list[int]) -> None:
        self.ended.append((job.request.request_id, ids))

    def begin_version(self) -> None: ...

    def free(self) -> None: ...


def right(done: Mapping[str, Completion]) -> StubDrafter:
    """A drafter that proposes the tokens that decoding without drafts has sampled."""

    def propose(request: GenerationRequest, ids: list[int], most: int) -> list[int]:
        first = len(ids) - len(request.prompt_ids)
        return done[request.request_id].token_ids[first : first + most]

    return StubDrafter(propose)


def wrong(done: Mapping[str, Completion]) -> StubDrafter:
    """A drafter none of whose drafts is right."""
    known = right(done)._propose

    def propose(request: GenerationRequest, ids: list[int], most: int) -> list[int]:
        tokens = known(request, ids, most)
        return [(token + 1) % VOCABULARY for token in tokens] + [5] * (most - len(tokens))

    return StubDrafter(propose)


def mixed(done: Mapping[str, Completion], seed: int) -> StubDrafter:
    """A drafter whose drafts are right, wrong, fewer or none at random."""
    known, dice = right(done)._propose, random.Random(seed)

    def propose(request: GenerationRequest, ids: list[int], most: int) -> list[int]:
        tokens = known(request, ids, dice.randint(0, most))
        return [token if dice.random() < 0.7 else dice.randrange(VOCABULARY) for token in tokens]

    return StubDrafter(propose)
