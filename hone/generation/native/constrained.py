"""Rows of the batch whose responses follow a constraint."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hone.errors import RequestError
from hone.generation.grammars import Grammars, RowGrammar
from hone.generation.native.sampler import Allowed
from hone.generation.native.scheduler import Job


class ConstrainedRows:
    """Follows the grammars of constrained responses, one token a step, on the device of the logits."""

    def __init__(self, grammars: Grammars, device: torch.device) -> None:
        self._grammars, self._device = grammars, device
        self._rows: list[tuple[int, Job, RowGrammar]] = []

    def __bool__(self) -> bool:
        return bool(self._rows)

    def set_rows(self, running: Sequence[Job]) -> None:
        """Note the constrained rows, after rows have entered or left."""
        self._rows = [(row, job, job.grammar) for row, job in enumerate(running) if job.grammar is not None]

    def begin(self, jobs: Sequence[Job]) -> None:
        """Find the first tokens of constrained responses.

        Raises:
            RequestError: a response would be empty.
        """
        starting = {job: job.grammar for job in jobs if job.grammar is not None}
        errors = self._find_masks(starting)
        errors |= {job: grammar.failure() for job, grammar in starting.items() if grammar.is_complete}
        if errors:
            raise next(iter(errors.values()))

    def allowed(self) -> Allowed:
        masks = torch.stack([mask for _, job, _ in self._rows if (mask := job.mask) is not None])
        rows = torch.tensor([row for row, _, _ in self._rows], device=self._device)
        return Allowed(rows, self._grammars.allowed(masks.to(self._device)))

    def follow(self, tokens: Sequence[Sequence[int]], is_full: Callable[[Job], bool]) -> dict[int, Exception | None]:
        """Append the sampled tokens; return the rows that cannot continue: None where the response is complete, else the error."""
        ends: dict[int, Exception | None] = {}
        continuing: dict[Job, RowGrammar] = {}
        row_of = {job: row for row, job, _ in self._rows}
        for row, job, grammar in self._rows:
            (token,) = tokens[row]
            if token in grammar.stops:
                continue
            try:
                grammar.accept(token)
            except RequestError as error:
                ends[row] = error
                continue
            continuing[job] = grammar
        errors = self._find_masks(continuing)
        for job, grammar in continuing.items():
            if job in errors and not is_full(job):
                ends[row_of[job]] = errors[job]
            elif grammar.is_complete:
                ends[row_of[job]] = None
        return ends

    def _find_masks(self, grammars: dict[Job, RowGrammar]) -> dict[Job, RequestError]:
        if not grammars:
            return {}
        jobs = list(grammars)
        masks, errors = self._grammars.masks(list(grammars.values()))
        for job, mask in zip(jobs, masks, strict=True):
            job.mask = mask
        return {jobs[index]: error for index, error in errors.items()}
