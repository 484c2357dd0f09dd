"""State of the decoded rows, as tensors, so that a step needs no Python loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from hone.generation.protocol import GenerationRequest

NO_TOKEN = -1


@dataclass
class RowState:
    """State of rows ``0 .. A - 1``; every tensor has ``A`` rows."""

    shared: Tensor  # cached tokens of the row's shared prefix, which is stored in a slot
    length: Tensor  # cached tokens in the row itself
    next_token: Tensor  # input of the next step
    generated: Tensor  # tokens sampled so far
    limit: Tensor  # maximum of sampled tokens
    stops: Tensor  # ``[A, S]`` tokens that end the response, padded with NO_TOKEN
    tokens: Tensor  # ``[A, M]`` sampled tokens
    log_probs: Tensor  # ``[A, M]`` of the sampled tokens under the raw policy
    sampling_log_probs: Tensor  # ``[A, M]`` of the same tokens under the distribution sampled from
    seen: Tensor  # ``[A, V]`` tokens in prompt or response, or ``[A, 0]`` when no row has a repetition penalty
    # ``[A, V]`` int32, occurrences of tokens in the response, or ``[A, 0]`` when no row has a presence or frequency
    # penalty
    counts: Tensor
    rope_offset: Tensor  # rotary position of a token less its number in the sequence; 0 without images

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[GenerationRequest],
        row_lengths: Sequence[int],
        vocabulary: int,
        device: torch.device,
        rope_offsets: Sequence[int] | None = None,
    ) -> RowState:
        """Return the state after prefill: prompts are cached except for their last token, ``row_lengths`` of it in the rows."""

        def vector(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        stops = [() if r.sampling.ignore_eos else r.sampling.stop_token_ids for r in requests]
        widest = max([1, *(len(ids) for ids in stops)])
        longest = max(r.sampling.max_tokens for r in requests)
        seen = torch.zeros(len(requests), 0, dtype=torch.bool, device=device)
        if any(r.sampling.repetition_penalty != 1 for r in requests):
            seen = torch.zeros(len(requests), vocabulary, dtype=torch.bool, device=device)
            for row, request in enumerate(requests):
                seen[row, vector([token for token in request.prompt_ids if token >= 0])] = True
        counts_tokens = any(r.sampling.presence_penalty or r.sampling.frequency_penalty for r in requests)
        return cls(
            shared=vector([len(r.prompt_ids) - 1 - n for r, n in zip(requests, row_lengths, strict=True)]),
            length=vector(row_lengths),
            next_token=vector([r.prompt_ids[-1] for r in requests]),
            generated=vector([0] * len(requests)),
            limit=vector([r.sampling.max_tokens for r in requests]),
            stops=torch.tensor([[*ids, *[NO_TOKEN] * (widest - len(ids))] for ids in stops], device=device),
            tokens=torch.full((len(requests), longest), NO_TOKEN, device=device),
            log_probs=torch.zeros(len(requests), longest, device=device),
            sampling_log_probs=torch.zeros(len(requests), longest, device=device),
            seen=seen,
            counts=torch.zeros(len(requests), vocabulary if counts_tokens else 0, dtype=torch.int32, device=device),
            rope_offset=vector(rope_offsets or [0] * len(requests)),
        )

    def record(
        self, tokens: Tensor, log_probs: Tensor, sampling_log_probs: Tensor, counts: Tensor | None = None
    ) -> None:
        """Append sampled tokens ``[N]``, all of row 0, then all of row 1; ``counts [A]`` are those of each row, None means one."""
        rows, place = torch.arange(len(self.generated), device=tokens.device), self.generated
        if counts is not None:
            rows = rows.repeat_interleave(counts)
            first = counts.cumsum(0) - counts
            place = (place - first)[rows] + torch.arange(len(tokens), device=tokens.device)
        self.tokens[rows, place] = tokens
        self.log_probs[rows, place] = log_probs
        self.sampling_log_probs[rows, place] = sampling_log_probs
        if self.seen.shape[1]:
            self.seen[rows, tokens] = True
        if self.counts.shape[1]:
            ones = torch.ones_like(tokens, dtype=torch.int32)
            self.counts.index_put_((rows, tokens), ones, accumulate=True)
        self.generated = self.generated + (1 if counts is None else counts)
        self.length = self.length + (1 if counts is None else counts)
        self.next_token = tokens if counts is None else tokens[counts.cumsum(0) - 1]

    @property
    def stopped(self) -> Tensor:
        """``[A]`` bool: True where the last sampled token is a stop token."""
        return (self.stops == self.next_token[:, None]).any(-1)

    @property
    def full(self) -> Tensor:
        """``[A]`` bool: True where the limit is reached."""
        return self.generated >= self.limit

    def with_shared_prefixes(self, moved_tokens: Sequence[int]) -> RowState:
        """Return the state after the first ``moved_tokens`` of each row have moved to a shared prefix."""
        moved = torch.tensor(moved_tokens, device=self.length.device)
        return replace(self, shared=self.shared + moved, length=self.length - moved)

    def select(self, rows: Tensor) -> RowState:
        return RowState(*(getattr(self, field.name)[rows] for field in fields(self)))

    def join(self, other: RowState) -> RowState:
        """Return these rows followed by those of ``other``; columns are widened to fit."""
        return RowState(*(_stack(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)))


def _stack(first: Tensor, second: Tensor) -> Tensor:
    if first.dim() == 2:
        width = max(first.shape[1], second.shape[1])
        first, second = _widen(first, width), _widen(second, width)
    return torch.cat([first, second])


def _widen(values: Tensor, width: int) -> Tensor:
    fill = NO_TOKEN if values.dtype == torch.int64 else 0
    return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=fill)
