"""Sampling of tokens: vectorised over the batch, with one random stream per row.

Sample ``i`` of a request looks up one uniform number, a hash of (seed, i), in the cumulative distribution. So the
tokens of a request do not depend on the other requests of the batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.data.tokenizer import outside_tokenizer
from hone.generation.protocol import SamplingParams

log = logging.getLogger("hone")

_GOLDEN, _MIX_1, _MIX_2 = -7046029254386353131, -4658895280553007687, -7723592293110705685
"""The constants of splitmix64 (Steele, Lea and Flood 2014), as signed 64-bit numbers."""
ALL_TOKENS = 2**31 - 1
"""Value of top-k that excludes no token."""
_COLUMNS = (
    "seeds", "temperature", "top_k", "top_p", "min_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "biased", "bias",
)  # fmt: skip


def uniforms(streams: Tensor, counters: Tensor) -> Tensor:
    """Return float64 multiples of 2**-52 in [0, 1), one for each (stream, counter), int64 of the same shape.

    splitmix64 of the counter, offset by the mixed seed; streams are from :func:`streams_of`.
    """
    state = _mixed(torch.add(streams, counters, alpha=_GOLDEN))
    return _shift(state, 12).double() * 2.0**-52


def signed(seed: int) -> int:
    return (seed + 2**63) % 2**64 - 2**63


def streams_of(seeds: Tensor) -> Tensor:
    """Return the first states of the random streams of int64 ``seeds``."""
    return _mixed(seeds) + _GOLDEN


def _mixed(state: Tensor) -> Tensor:
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    return state ^ _shift(state, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """Shift logically to the right."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class RowSampling:
    """Sampling parameters of the rows of a batch, one tensor per parameter."""

    seeds: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    presence_penalty: Tensor
    frequency_penalty: Tensor
    biased: Tensor  # ``[A, B]`` int64, tokens with a logit bias, padded with token 0
    bias: Tensor  # ``[A, B]``, what is added to their logits, padded with 0
    penalises: bool  # whether any row has a repetition penalty
    counts: bool  # whether any row has a presence or frequency penalty
    truncates: bool  # whether any row uses top-k, top-p or min-p
    greedy: bool  # whether any row has temperature 0
    reports_support: bool  # whether any row reports the support of its tokens

    @cached_property
    def streams(self) -> Tensor:
        """``[A]`` random streams."""
        return streams_of(self.seeds)

    @cached_property
    def takes_likeliest(self) -> Tensor:
        """``[A]`` bool: True for temperature 0."""
        return self.temperature == 0

    @cached_property
    def divisor(self) -> Tensor:
        return torch.where(self.takes_likeliest, 1.0, self.temperature)[:, None]

    @classmethod
    def from_params(cls, params: Sequence[SamplingParams], seeds: Sequence[int], device: torch.device) -> RowSampling:
        """Stack the parameters of several requests."""

        def column(values: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        widest = max(len(p.logit_bias) for p in params)
        pairs = [[*p.logit_bias, *[(0, 0.0)] * (widest - len(p.logit_bias))] for p in params]
        return cls(
            seeds=column([signed(seed) for seed in seeds], torch.int64),
            temperature=column([p.temperature for p in params]),
            top_k=column([p.top_k if p.top_k > 0 else ALL_TOKENS for p in params], torch.int64),
            top_p=column([p.top_p for p in params]),
            min_p=column([p.min_p for p in params]),
            repetition_penalty=column([p.repetition_penalty for p in params]),
            presence_penalty=column([p.presence_penalty for p in params]),
            frequency_penalty=column([p.frequency_penalty for p in params]),
            biased=torch.tensor([[token for token, _ in row] for row in pairs], dtype=torch.int64, device=device),
            bias=torch.tensor([[bias for _, bias in row] for row in pairs], dtype=torch.float32, device=device),
            **cls.flags(params),
        )

    @staticmethod
    def flags(params: Sequence[SamplingParams]) -> dict[str, bool]:
        """Return what any of several requests needs: the last five attributes."""
        return {
            "penalises": any(p.repetition_penalty != 1 for p in params),
            "counts": any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params),
            "truncates": any(p.truncates for p in params),
            "greedy": any(p.temperature == 0 for p in params),
            "reports_support": any(p.wants_support for p in params),
        }

    def select(self, rows: Tensor) -> RowSampling:
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    def join(self, other: RowSampling) -> RowSampling:
        columns = {name: _stacked(getattr(self, name), getattr(other, name)) for name in _COLUMNS}
        return RowSampling(
            **columns,
            penalises=self.penalises or other.penalises,
            counts=self.counts or other.counts,
            truncates=self.truncates or other.truncates,
            greedy=self.greedy or other.greedy,
            reports_support=self.reports_support or other.reports_support,
        )


class Draws(NamedTuple):
    """One sampled token for each row."""

    tokens: Tensor  # ``[A]`` int64
    log_probs: Tensor  # ``[A]``, under ``softmax(logits / temperature)``
    sampling_log_probs: Tensor  # ``[A]``, under the distribution sampled from
    support: Tensor | None  # ``[A, V]`` bool, the tokens that could be sampled; None if no row reports it

    def select(self, index: Tensor) -> Draws:
        return Draws(*(None if values is None else values[index] for values in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Allowed:
    """Tokens that constraints allow in some rows."""

    rows: Tensor  # ``[C]`` int64, the constrained rows
    tokens: Tensor  # ``[C, V]`` bool


def sample(
    logits: Tensor,  # ``[A, V]``
    rows: RowSampling,
    counters: Tensor,  # ``[A]`` int64, number of tokens sampled before for each request
    seen: Tensor | None,  # ``[A, V]`` bool, tokens in prompt or response, when a row has a repetition penalty
    # ``[A, V]`` int32, occurrences of tokens in the response, when a row has a presence or frequency penalty
    counts: Tensor | None = None,
    allowed: Allowed | None = None,  # tokens that constraints allow, when a row has a constraint
    # ``[V]`` bool, ids that the tokenizer lacks, which are never sampled. Log-probs of the policy include them, as the
    # trainer's do
    outside: Tensor | None = None,
) -> Draws:
    """Sample one token per row. Rows of temperature 0 get the likeliest token and log-probs of temperature 1."""
    logits = logits.float()
    raw = logits / rows.divisor
    adjusted = _adjusted(logits, rows, seen, counts)
    scaled = raw if adjusted is logits else adjusted / rows.divisor
    if allowed is not None:
        permitted = scaled[allowed.rows].masked_fill(~allowed.tokens, float("-inf"))
        scaled = scaled.index_copy(0, allowed.rows, permitted)
    if outside is not None:
        scaled = scaled.masked_fill(outside, float("-inf"))
    if rows.truncates:
        scaled = truncate(scaled, rows)
    sampled_from = scaled.log_softmax(-1)
    cumulative = sampled_from.exp().cumsum(-1, dtype=torch.float64)
    # The number is below the total even after rounding, so a token of probability 0 is never selected.
    draw = uniforms(rows.streams, counters)[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, draw, right=True)[:, 0]
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    if rows.greedy:
        tokens = torch.where(rows.takes_likeliest, scaled.argmax(-1), tokens)
    sampling_log_probs = _gather(sampled_from, tokens)
    support = scaled.isfinite() if rows.reports_support else None
    if scaled is raw:
        return Draws(tokens, sampling_log_probs, sampling_log_probs, support)
    log_probs = _gather(raw.log_softmax(-1), tokens)
    return Draws(tokens, log_probs, torch.where(rows.takes_likeliest, log_probs, sampling_log_probs), support)


def likeliest(logits: Tensor, rows: RowSampling, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` likeliest tokens of each row under the raw policy, ``[A, count]`` int64, and their log-probs."""
    log_probs = (logits.float() / rows.divisor).log_softmax(-1)
    top = log_probs.topk(min(count, logits.shape[1]), dim=-1)
    return top.indices, top.values


def _adjusted(logits: Tensor, rows: RowSampling, seen: Tensor | None, counts: Tensor | None) -> Tensor:
    """Return the logits with bias and penalties; the same tensor if no row has any."""
    if rows.bias.shape[1]:
        logits = logits.scatter_add(1, rows.biased, rows.bias)
    if seen is not None:
        penalty = rows.repetition_penalty[:, None]
        penalised = torch.where(logits > 0, logits / penalty, logits * penalty)
        logits = torch.where(seen, penalised, logits)
    if counts is not None:
        penalty = rows.frequency_penalty[:, None] * counts + rows.presence_penalty[:, None] * (counts > 0)
        logits = logits - penalty
    return logits


def truncate(scaled: Tensor, rows: RowSampling) -> Tensor:
    """Set scores to minus infinity where top-k, then top-p, then min-p exclude a token; the likeliest always stays.

    Each rule applies to the renormalised result of the rule before. A row without rules is returned bit-equal.
    """
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scaled.shape[1], device=scaled.device)
    ordered = ordered.masked_fill(rank >= rows.top_k[:, None], float("-inf"))
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    out = (before >= rows.top_p[:, None]) & (rank > 0) & (rows.top_p < 1)[:, None]
    ordered = ordered.masked_fill(out, float("-inf"))
    probabilities = ordered.softmax(-1)
    ordered = ordered.masked_fill(probabilities < rows.min_p[:, None] * probabilities[:, :1], float("-inf"))
    return torch.empty_like(scaled).scatter_(-1, order, ordered)


def _stacked(first: Tensor, second: Tensor) -> Tensor:
    """Return the rows of both tensors; those of a matrix are padded with 0 to the same width."""
    if first.dim() == 2:
        width = max(first.shape[1], second.shape[1])
        first, second = (torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in (first, second))
    return torch.cat([first, second])


def _gather(log_probs: Tensor, tokens: Tensor) -> Tensor:
    return log_probs.gather(-1, tokens[:, None])[:, 0]


def never_sampled(tokenizer: Any, vocabulary: int, device: torch.device) -> Tensor | None:
    """Return which ids no token of the tokenizer has, ``[vocabulary]`` bool, and say how many; None if there are none."""
    if not hasattr(tokenizer, "get_vocab"):
        return None
    outside = outside_tokenizer(tokenizer, vocabulary)
    count = int(outside.sum())
    if count == 0:
        return None
    log.info("%d of %d token ids are not in the tokenizer and are never sampled", count, vocabulary)
    return outside.to(device)
