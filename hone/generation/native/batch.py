"""The rows being decoded: per-row state as tensors, so that a step needs no Python loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hone.generation.protocol import GenerationRequest

NO_TOKEN = -1


@dataclass
class RowState:
    """State of rows ``0 .. A - 1``; every tensor has ``A`` rows.

    Attributes:
        shared: tokens in the cache that the row's prompt has in a slot, which other rows may continue too.
        length: tokens in the cache of the row's own.
        next_token: the token that the next step feeds.
        generated: tokens drawn so far.
        limit: most tokens to draw.
        stops: ``[A, S]`` tokens that end the response, padded with NO_TOKEN.
        tokens: ``[A, M]`` tokens drawn.
        log_probs: ``[A, M]`` under the raw policy.
        sampling_log_probs: ``[A, M]`` under the distribution sampled from.
        seen: ``[A, V]`` tokens in prompt or response, or ``[A, 0]`` when no row has a repetition penalty.
    """

    shared: Tensor
    length: Tensor
    next_token: Tensor
    generated: Tensor
    limit: Tensor
    stops: Tensor
    tokens: Tensor
    log_probs: Tensor
    sampling_log_probs: Tensor
    seen: Tensor

    @classmethod
    def of(
        cls, requests: Sequence[GenerationRequest], begun: Sequence[int], vocabulary: int, device: torch.device
    ) -> RowState:
        """The state of requests whose prompts, but for the last token, are in the cache, ``begun`` tokens in their rows."""

        def vector(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        stops = [() if r.sampling.ignore_eos else r.sampling.stop_token_ids for r in requests]
        widest = max([1, *(len(ids) for ids in stops)])
        longest = max(r.sampling.max_tokens for r in requests)
        seen = torch.zeros(len(requests), 0, dtype=torch.bool, device=device)
        if any(r.sampling.repetition_penalty != 1 for r in requests):
            seen = torch.zeros(len(requests), vocabulary, dtype=torch.bool, device=device)
            for row, request in enumerate(requests):
                seen[row, vector(request.prompt_ids)] = True
        return cls(
            shared=vector([len(r.prompt_ids) - 1 - own for r, own in zip(requests, begun, strict=True)]),
            length=vector(begun),
            next_token=vector([r.prompt_ids[-1] for r in requests]),
            generated=vector([0] * len(requests)),
            limit=vector([r.sampling.max_tokens for r in requests]),
            stops=torch.tensor([[*ids, *[NO_TOKEN] * (widest - len(ids))] for ids in stops], device=device),
            tokens=torch.full((len(requests), longest), NO_TOKEN, device=device),
            log_probs=torch.zeros(len(requests), longest, device=device),
            sampling_log_probs=torch.zeros(len(requests), longest, device=device),
            seen=seen,
        )

    def record(self, tokens: Tensor, log_probs: Tensor, sampling_log_probs: Tensor) -> None:
        """Append the tokens drawn."""
        place = self.generated[:, None]
        self.tokens.scatter_(1, place, tokens[:, None])
        self.log_probs.scatter_(1, place, log_probs[:, None])
        self.sampling_log_probs.scatter_(1, place, sampling_log_probs[:, None])
        if self.seen.shape[1]:
            self.seen.scatter_(1, tokens[:, None], True)
        self.generated = self.generated + 1
        self.length = self.length + 1
        self.next_token = tokens

    @property
    def stopped(self) -> Tensor:
        """``[A]``: whether the last token drawn is a stop token."""
        return (self.stops == self.next_token[:, None]).any(-1)

    @property
    def full(self) -> Tensor:
        """``[A]``: whether no more tokens are to be drawn."""
        return self.generated >= self.limit

    def with_prompts_apart(self, begun: Sequence[int]) -> RowState:
        """The same rows, when the ``begun`` tokens with which they began in the cache are no longer their own."""
        moved = torch.tensor(begun, device=self.length.device)
        return replace(self, shared=self.shared + moved, length=self.length - moved)

    def select(self, rows: Tensor) -> RowState:
        """These rows, in this order."""
        return RowState(*(getattr(self, field.name)[rows] for field in fields(self)))

    def join(self, other: RowState) -> RowState:
        """These rows, then those of ``other``; columns are widened to fit."""
        return RowState(*(_stack(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def _stack(first: Tensor, second: Tensor) -> Tensor:
    if first.dim() == 2:
        width = max(first.shape[1], second.shape[1])
        first, second = _widen(first, width), _widen(second, width)
    return torch.cat([first, second])


def _widen(values: Tensor, width: int) -> Tensor:
    fill = NO_TOKEN if values.dtype == torch.int64 else 0
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
