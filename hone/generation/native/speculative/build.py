"""Construction of the configured speculation."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakValueDictionary

import torch

from hone.config.model import ModelConfig
from hone.config.rollout import SpeculativeConfig
from hone.generation.native.scheduler import Job
from hone.generation.native.speculative.draft_model import ModelDrafter
from hone.generation.native.speculative.drafts import Drafter, DraftRow, Speculation
from hone.generation.native.speculative.training import DraftTrainer
from hone.models.loading import load_policy


class _Continuations:
    """For each n-gram of a part of a sequence, the place of the token after its last occurrence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._places: dict[tuple[int, ...], int] = {}

    def add(self, ids: Sequence[int], first: int, end: int) -> None:
        """Add the n-grams that the tokens ``first .. end - 1`` continue."""
        for place in range(first, end):
            for size in self._sizes:
                if size <= place:
                    self._places[tuple(ids[place - size : place])] = place

    def place(self, ngram: tuple[int, ...]) -> int | None:
        """Return the place of the token after the last occurrence of an n-gram."""
        return self._places.get(ngram)


class _Row:
    """The n-grams of a row: those of its prompt, which rows of the same prompt share, and those of its response."""

    def __init__(self, prompt: _Continuations, response: _Continuations, num_added: int) -> None:
        self.prompt, self.response, self.num_added = prompt, response, num_added


class NgramDrafter(Drafter):
    """Drafts what followed the last tokens before, whatever weights sampled them."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._prompts: WeakValueDictionary[bytes, _Continuations] = WeakValueDictionary()
        self._rows: dict[Job, _Row] = {}

    def draft(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Return what followed the longest n-gram that occurred before."""
        return [self._draft(row) for row in rows]

    def end(self, job: Job, ids: list[int]) -> None:
        del ids
        self._rows.pop(job, None)

    def _draft(self, row: DraftRow) -> list[int]:
        ids = row.ids
        entry = self._rows.get(row.job) or self._enter(row.job)
        entry.response.add(ids, entry.num_added, len(ids))
        entry.num_added = len(ids)
        for size in range(min(self._longest, len(ids)), self._shortest - 1, -1):
            ngram = tuple(ids[-size:])
            place = entry.response.place(ngram) or entry.prompt.place(ngram)
            if place is not None:
                return _copied(ids, place, row.most)
        return []

    def _enter(self, job: Job) -> _Row:
        prompt_ids = job.request.prompt_ids
        prompt = self._prompts.get(job.prompt)
        if prompt is None:
            prompt = self._prompts[job.prompt] = _Continuations(self._shortest, self._longest)
            prompt.add(prompt_ids, 0, len(prompt_ids))
        row = self._rows[job] = _Row(prompt, _Continuations(self._shortest, self._longest), len(prompt_ids))
        return row


def _copied(ids: Sequence[int], place: int, count: int) -> list[int]:
    """Return ``count`` tokens from ``place`` on; after the end of ``ids`` the copy reads itself, so that a cycle continues."""
    drafts: list[int] = []
    for index in range(place, place + count):
        drafts.append(ids[index] if index < len(ids) else drafts[index - len(ids)])
    return drafts


def speculation_from_config(
    config: SpeculativeConfig, *, device: torch.device, dtype: str, trust_remote_code: bool = False
) -> Speculation | None:
    """Return the configured speculation of an engine, with the draft model loaded; None without one."""
    if config.method is None:
        return None
    drafter: Drafter = NgramDrafter(config.prompt_lookup_min, config.prompt_lookup_max)
    if config.method == "draft_model":
        settings = ModelConfig(path=config.model, trust_remote_code=trust_remote_code)
        model = load_policy(settings, device=device, seed=0, trainable=False)
        trainer = None
        if config.draft_lr > 0:
            trainer = DraftTrainer(model, learning_rate=config.draft_lr, device=device, dtype=dtype)
        drafter = ModelDrafter(model, device=device, dtype=getattr(torch, dtype), trainer=trainer)
    return Speculation(drafter, num_tokens=config.num_speculative_tokens, max_rows=config.disable_by_batch_size)
