"""Attention of some queries to some of the keys that they see, with log-sum-exps, so that parts add up to the whole.

A row of packed sequences is divided over blocks (the tokens of a rank). The queries of one block meet the keys of another in *runs*: the
queries of a run follow one another in a sequence, and all of them see all keys of the run, except in the block of the queries, where the
last keys are the queries themselves. So a part is one variable-length FlashAttention call without a mask, or with the causal one.

With ``lse_i`` the log-sum-exp of a query's scores in part i, and ``lse`` that of all its scores (Milakov and Gimelshein 2018):

    out  = sum_i exp(lse_i - lse) out_i          probability of a key = exp(score - lse)

The backward pass takes ``lse`` and ``out`` of the whole, and computes each part again. What no variable-length call supports, and the CPU,
computes padded tiles of runs: matmul, softmax, matmul.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hone.algorithms.masked import wide
from hone.data.ragged import Ragged
from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.tiles import pack_tiles
from hone.models.attention.varlen import VarlenPlan
from hone.models.gather import Gather
from hone.models.kernels.cpu.matmul import fast_float32_matmuls

LONGEST_TILE = 128
"""Most queries of a run that is computed in tiles. Fewer waste less above the diagonal, more make larger matmuls."""
MOST_KEYS = 4096
"""Most keys of a run in one tile; further ones are in further tiles."""
_TILE_ENTRIES = 1 << 16
"""Most pairs of a query and a key in a tile with several runs, on the CPU."""
_TILE_ENTRIES_ELSEWHERE = 1 << 21


class Totals(NamedTuple):
    """Sums of the parts of some queries."""

    out: Tensor  # ``[n, heads, d_v]``
    lse: Tensor  # ``[n, heads]``, log-sum-exp of the scores; minus infinity before the first part

    @classmethod
    def empty(cls, query: Tensor, value: Tensor) -> Totals:
        """Return the totals of ``query [n, heads, d]`` before the first part, in float32 or better."""
        dtype = torch.promote_types(query.dtype, torch.float32)
        lse = query.new_full(query.shape[:2], float("-inf"), dtype=dtype)
        return cls(query.new_zeros(*query.shape[:2], value.shape[2], dtype=dtype), lse)

    def add(self, rows: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Add a part of the queries ``rows``, or of all of them."""
        before, lse = self.lse if rows is None else self.lse.index_select(0, rows), lse.to(self.lse.dtype)
        total = torch.logaddexp(before, lse)
        scale = _finite(total)  # a query may have seen no key yet
        merged = (self.out if rows is None else self.out.index_select(0, rows)) * (before - scale).exp()[..., None]
        merged += out * (lse - scale).exp()[..., None]
        if rows is None:
            self.out.copy_(merged)
            self.lse.copy_(total)
        else:
            self.out.index_copy_(0, rows, merged)
            self.lse.index_copy_(0, rows, total)

    def add_sinks(self, sinks: Tensor) -> None:
        """Add keys without a value: ``[heads]`` scores that take probability (GPT-OSS)."""
        total = torch.logaddexp(self.lse, sinks.to(self.lse.dtype))
        self.out.mul_((self.lse - total).exp()[..., None])
        self.lse.copy_(total)


class Incoming(NamedTuple):
    """Gradient and results of the whole, for the backward pass of every part."""

    grad: Tensor  # ``[n, heads, d_v]``, gradient of the output
    out: Tensor  # ``[n, heads, d_v]``, the output
    lse: Tensor  # ``[n, heads]``, log-sum-exp of all scores
    delta: Tensor  # ``[n, heads]``, sum of ``grad * out`` over the last dimension


class _Tile(NamedTuple):
    """Runs of similar sizes, padded on the right."""

    shape: tuple[int, int, int]  # runs, queries, keys
    queries: Tensor  # ``[runs * queries]`` query in each slot; padding repeats the last one of its run
    keys: Tensor  # ``[runs * keys]`` key in each slot; padding repeats the last one of its run
    real: Tensor | None  # slots of ``queries`` that are not padding; None for all
    padding: Tensor | None  # ``[runs * queries, 1, 1]``, True in the others; None for none
    query_positions: Tensor  # ``[runs, queries]``
    key_positions: Tensor  # ``[runs, keys]``, of padding larger than any other
    masked: bool  # whether a query of the tile does not see all of the keys


@dataclass(frozen=True)
class Runs:
    """The runs in which the queries of one block meet the keys of another, or of its own."""

    queries: Ragged  # of each run, by place in their block, ascending by sequence and position
    keys: Ragged  # of each run, by place in theirs; at least one
    query_positions: Tensor  # ``[Q]`` in their sequences
    key_positions: Tensor  # ``[K]``
    within: bool  # whether both are of one block; then the last keys of a run are its queries
    block: tuple[int, int]  # ``(queries, keys)`` of the blocks, runs or not
    device: torch.device  # of the states

    @cached_property
    def rows(self) -> Tensor | None:
        """The queries that are in a run, ``[Q]``; None if those are all of the block, in order."""
        values = self.queries.values
        whole = len(values) == self.block[0] and bool((values == torch.arange(len(values))).all())
        return None if whole else values.to(self.device)

    @cached_property
    def plan(self) -> VarlenPlan:
        queries, keys = self.queries, self.keys
        return VarlenPlan(
            query_ends=queries.offsets.to(self.device, torch.int32),
            key_ends=keys.offsets.to(self.device, torch.int32),
            longest_query=int(queries.lengths.max()),
            longest_key=int(keys.lengths.max()),
            gather=Gather.from_source(keys.values, self.block[1], self.device),
            names_groups="enable_gqa" in varlen.options_of_varlen(),
        )

    @cached_property
    def tiles(self) -> list[_Tile]:
        most = _TILE_ENTRIES if self.device.type == "cpu" else _TILE_ENTRIES_ELSEWHERE
        tiles = []
        for first_key in range(0, int(self.keys.lengths.max()), MOST_KEYS):
            key_lengths = (self.keys.lengths - first_key).clamp(max=MOST_KEYS)
            runs = (key_lengths > 0).nonzero()[:, 0]
            query_lengths, key_lengths = self.queries.lengths[runs], key_lengths[runs]
            groups = pack_tiles(query_lengths.tolist(), key_lengths.tolist(), lambda queries, keys: queries * keys)
            for group in map(torch.tensor, groups):
                slots = int(query_lengths[group].max()) * int(key_lengths[group].max())
                for part in group.split(max(1, most // slots)):
                    tiles.append(self._tile(runs[part], first_key, key_lengths[part]))
        return tiles

    def _tile(self, runs: Tensor, first_key: int, key_lengths: Tensor) -> _Tile:
        query_lengths, key_lengths = self.queries.lengths[runs][:, None], key_lengths[:, None]
        column, key_column = torch.arange(int(query_lengths.max())), torch.arange(int(key_lengths.max()))
        query = self.queries.offsets[:-1][runs][:, None] + torch.minimum(column, query_lengths - 1)
        key = self.keys.offsets[:-1][runs][:, None] + first_key + torch.minimum(key_column, key_lengths - 1)
        padding, key_padding = (column >= query_lengths).flatten(), key_column >= key_lengths
        has_padding = bool(padding.any())
        far = torch.iinfo(torch.int64).max // 2
        return _Tile(
            (len(runs), len(column), len(key_column)),
            self.queries.values[query.flatten()].to(self.device),
            self.keys.values[key.flatten()].to(self.device),
            (~padding).nonzero()[:, 0].to(self.device) if has_padding else None,
            padding[:, None, None].to(self.device) if has_padding else None,
            self.query_positions[query].to(self.device),
            self.key_positions[key].masked_fill(key_padding, far).to(self.device),
            masked=self.within or bool(key_padding.any()),
        )


def obstacle(query: Tensor, value: Tensor, scoring: Scoring) -> str | None:
    """Return why no variable-length call can compute parts of this attention, or None; see :func:`.varlen.obstacle`."""
    if scoring.window is not None:
        return "sequences are longer than the attention window, and their tokens are divided over ranks"
    if "return_aux" not in varlen.options_of_varlen():
        return f"torch {torch.__version__} has no torch.nn.attention.varlen with log-sum-exps"
    return varlen.obstacle(query, value, dataclasses.replace(scoring, sinks=None))


def add_part(
    totals: Totals, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, runs: Runs, *, fused: bool
) -> None:
    """Add the attention of ``query [n, heads, d]`` to one block of ``key [m, kv_heads, d]`` to ``totals``; sinks are left out.

    Query head ``i`` uses key head ``i // (heads / kv_heads)``. With ``fused`` it is one variable-length call, in the dtype of
    the states; else tiles, in float32 or better.
    """
    if len(runs.queries) == 0:
        return
    if fused:
        out, lse = _call(query, key, value, scoring, runs)
        totals.add(runs.rows, out, lse)
        return
    with _exact(query):
        for tile in runs.tiles:
            q, k, v = _gathered(tile, query, key, value)
            scores = _scores(tile, q, k, scoring)
            lse = scores.logsumexp(-1, keepdim=True)
            out = torch.bmm((scores - _finite(lse)).exp_(), v)
            queries = tile.queries if tile.real is None else tile.queries.index_select(0, tile.real)
            totals.add(queries, _of_slots(tile, out, query), _of_slots(tile, lse, query)[..., 0])


def add_part_gradients(
    grads: tuple[Tensor, Tensor, Tensor],  # of the shapes of ``query``, ``key`` and ``value``, in float32 or better
    incoming: Incoming,  # gradient and results of the whole
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    runs: Runs,
    *,
    fused: bool,  # as in the forward pass
) -> None:
    """Add the gradients of one part to those of queries, keys and values; see :func:`add_part`."""
    if len(runs.queries) == 0:
        return
    if fused:
        _add_call_gradients(grads, incoming, query, key, value, scoring, runs)
        return
    with _exact(query):
        for tile in runs.tiles:
            q, k, v = _gathered(tile, query, key, value)
            scores = _scores(tile, q, k, scoring)
            outer, lse, delta = (_of_queries(tile, part, key.shape[1]) for part in _without_padding(tile, incoming))
            probabilities = (scores - lse).exp_()
            grad_scores = (torch.bmm(outer, v.transpose(1, 2)) - delta).mul_(probabilities)
            if scoring.softcap is not None:
                capped = scores.masked_fill(scores == float("-inf"), 0.0) / scoring.softcap
                grad_scores *= 1 - capped.square_()
            grad_scores *= scoring.scale
            grad_query = _of_slots(tile, torch.bmm(grad_scores, k), query, keep_padding=True)
            grads[0].index_add_(0, tile.queries, grad_query)
            for grad, left, right in ((grads[1], grad_scores, q), (grads[2], probabilities, outer)):
                part = torch.bmm(left.transpose(1, 2), right).view(tile.shape[0], key.shape[1], tile.shape[2], -1)
                grad.index_add_(0, tile.keys, part.transpose(1, 2).flatten(0, 1))


def sink_gradients(incoming: Incoming, sinks: Tensor) -> Tensor:
    """Return the gradient ``[heads]`` of scores that take probability and have no value."""
    probabilities = (sinks.to(incoming.lse.dtype) - incoming.lse).exp()
    return -(probabilities * incoming.delta).sum(0).to(sinks.dtype)


def _call(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, runs: Runs) -> tuple[Tensor, Tensor]:
    """Return outputs ``[Q, heads, d]`` and log-sum-exps ``[Q, heads]`` of the queries that are in a run."""
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    plan = runs.plan
    query, key, value = _called(query, key, value, runs)
    options: dict[str, Any] = {"scale": scoring.scale, "window_size": (-1, 0 if runs.within else -1)}
    if plan.names_groups:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    longest = plan.longest_query, plan.longest_key
    out, lse = varlen_attn(
        query, key, value, plan.query_ends, plan.key_ends, *longest, return_aux=AuxRequest(lse=True), **options
    )
    return out, lse.transpose(0, 1)


def _add_call_gradients(
    grads: tuple[Tensor, Tensor, Tensor],
    incoming: Incoming,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scoring: Scoring,
    runs: Runs,
) -> None:
    plan, rows = runs.plan, runs.rows
    query, key, value = _called(query, key, value, runs)
    grad, out, lse = incoming.grad, incoming.out, incoming.lse
    if rows is not None:
        grad, out, lse = (part.index_select(0, rows) for part in (grad, out, lse))
    parts = torch.ops.torch_attn._varlen_attn_backward(
        grad.to(query.dtype),
        *(query, key, value, out.to(query.dtype), lse.transpose(0, 1).contiguous().float()),
        *(plan.query_ends, plan.key_ends, plan.longest_query, plan.longest_key, runs.within),
        torch.zeros(2, dtype=torch.uint64, device=query.device),
        scoring.scale,
        [-1, 0 if runs.within else -1],
    )
    if rows is None:
        grads[0].add_(parts[0])
    else:
        grads[0].index_add_(0, rows, parts[0].to(grads[0].dtype))
    assert plan.gather is not None
    for total, part in zip(grads[1:], parts[1:], strict=True):
        total.add_(plan.gather.sums(part.to(total.dtype)))


def _called(query: Tensor, key: Tensor, value: Tensor, runs: Runs) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values in the order of the runs."""
    gather = runs.plan.gather
    assert gather is not None
    key, value = (states.index_select(0, gather.source) for states in (key, value))
    return query if runs.rows is None else query.index_select(0, runs.rows), key, value


@contextlib.contextmanager
def _exact(states: Tensor) -> Iterator[None]:
    with fast_float32_matmuls(states.device), torch.autocast(states.device.type, enabled=False):
        yield


def _gathered(tile: _Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[runs * kv_heads, group * queries, d]``, and keys and values ``[runs * kv_heads, keys, d]``."""
    runs, _, keys = tile.shape
    q = _of_queries(tile, query.index_select(0, tile.queries), key.shape[1])
    k, v = (
        wide(states.index_select(0, tile.keys)).view(runs, keys, states.shape[1], -1).transpose(1, 2).flatten(0, 1)
        for states in (key, value)
    )
    return q, k, v


def _of_queries(tile: _Tile, states: Tensor, kv_heads: int) -> Tensor:
    """``[runs * queries, heads, d]`` to ``[runs * kv_heads, group * queries, d]``."""
    runs, queries, _ = tile.shape
    by_head = wide(states).view(runs, queries, kv_heads, -1, states.shape[2])
    return by_head.permute(0, 2, 3, 1, 4).reshape(runs * kv_heads, -1, states.shape[2])


def _of_slots(tile: _Tile, states: Tensor, query: Tensor, *, keep_padding: bool = False) -> Tensor:
    """``[runs * kv_heads, group * queries, d]`` to ``[slots, heads, d]``, without padding."""
    runs, queries, _ = tile.shape
    by_slot = states.view(runs, query.shape[1], queries, -1).transpose(1, 2).flatten(0, 1)
    return by_slot if keep_padding or tile.real is None else by_slot.index_select(0, tile.real)


def _without_padding(tile: _Tile, incoming: Incoming) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradient, log-sum-exp and delta in the query slots, ``[slots, heads, d or 1]``; the gradients of padding are 0."""
    grad, lse, delta = (part.index_select(0, tile.queries) for part in (incoming.grad, incoming.lse, incoming.delta))
    if tile.padding is not None:
        grad, delta = grad.masked_fill(tile.padding, 0.0), delta.masked_fill(tile.padding[..., 0], 0.0)
    return grad, lse[..., None], delta[..., None]


def _scores(tile: _Tile, q: Tensor, k: Tensor, scoring: Scoring) -> Tensor:
    """Scores ``[runs * kv_heads, group * queries, keys]``, minus infinity where a query does not see a key."""
    scores = torch.bmm(q * scoring.scale, k.transpose(1, 2))
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap).mul_(scoring.softcap)
    if tile.masked or scoring.window is not None:
        distance = tile.query_positions[:, :, None] - tile.key_positions[:, None]
        hidden = distance < 0
        if scoring.window is not None:
            hidden |= distance >= scoring.window
        runs, queries, keys = tile.shape
        scores.view(runs, -1, queries, keys).masked_fill_(hidden[:, None], float("-inf"))
    return scores


def _finite(lse: Tensor) -> Tensor:
    """Replace the log-sum-exps of no score at all by 0."""
    return lse.masked_fill(lse == float("-inf"), 0.0)
