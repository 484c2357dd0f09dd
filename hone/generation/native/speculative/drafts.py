"""Drafts of the running rows: which rows get them, and how many of a row's drafts are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from hone.generation.native.scheduler import Job


class DraftRow(NamedTuple):
    """A row that a drafter continues."""

    job: Job
    ids: list[int]  # prompt and sampled tokens; the drafter must not change them
    most: int  # maximum of drafts, at least 1
    sampled: int = 0  # number of tokens sampled so far


class Drafter(Protocol):
    """Proposes the next tokens of rows. No sampled token depends on it, only how many forward passes they take."""

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return at most ``most`` drafts for each row; none where it has no proposal."""
        ...

    def end(self, job: Job, ids: list[int]) -> None:
        """Drop what is kept for a job that leaves its row with the tokens ``ids``."""
        ...

    def begin_version(self) -> None:
        """Note that the policy has new weights."""

    def free(self) -> None:
        """Free the memory of caches; no row is running."""


class Speculation:
    """Drafts for the rows of an engine.

    A row and step has at most ``num_tokens`` drafts; with more than ``max_rows`` running rows a step has none.
    """

    def __init__(self, drafter: Drafter, *, num_tokens: int, max_rows: int | None = None) -> None:
        self.drafter, self.num_tokens, self._max_rows = drafter, num_tokens, max_rows
        self._ids: dict[Job, list[int]] = {}

    def drafts(self, jobs: Sequence[Job], num_sampled: Callable[[Job], int], vocabulary: int) -> list[list[int]]:
        """Return the drafts of each running job for the next step; empty lists where it has none.

        A row gets no more drafts than its request has tokens left, less the one that every step samples, and none from the first
        that the policy does not have.
        """
        drafts: list[list[int]] = [[] for _ in jobs]
        if self._max_rows is not None and len(jobs) > self._max_rows:
            return drafts
        rows: dict[int, DraftRow] = {}
        for row, job in enumerate(jobs):
            sampled = num_sampled(job)
            left = job.request.sampling.max_tokens - sampled - 1
            if left > 0 and _may_draft(job):
                rows[row] = DraftRow(job, self._sequence(job), min(left, self.num_tokens), sampled)
        for row, tokens in zip(rows, self.drafter.draft(list(rows.values())), strict=True):
            drafts[row] = list(takewhile(lambda token: 0 <= token < vocabulary, tokens[: rows[row].most]))
        return drafts

    def append(self, jobs: Sequence[Job], tokens: Sequence[Sequence[int]]) -> None:
        for job, new in zip(jobs, tokens, strict=True):
            self._sequence(job).extend(new)

    def end(self, jobs: Iterable[Job]) -> None:
        """Forget jobs that leave their rows."""
        for job in jobs:
            self.drafter.end(job, self._sequence(job))
            del self._ids[job]

    def _sequence(self, job: Job) -> list[int]:
        if job not in self._ids:
            self._ids[job] = list(job.request.prompt_ids)
        return self._ids[job]


def _may_draft(job: Job) -> bool:
    """Return whether the distribution of a token depends on earlier sampled tokens only through the model.

    Penalties and constraints depend on them in other ways: each position would need the state after the drafts before it.
    """
    sampling = job.request.sampling
    penalties = sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    return job.grammar is None and not penalties


def accepted(tokens: Sequence[int], drafts: Sequence[int], stops: Iterable[int]) -> int:
    """Return how many of a row's ``tokens`` are kept, at least one; they are one more than its drafts."""
    for index, (token, draft) in enumerate(zip(tokens, drafts, strict=False)):
        if token != draft or token in stops:
            return index + 1
    return len(tokens)
