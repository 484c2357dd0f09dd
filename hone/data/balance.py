"""Balance the work of a batch: assign rows to ranks or micro-batches.

Work is counted in tokens of the matmuls plus token pairs of attention, which grow with the square of the length. Rows that stay
together compute a common prefix once (:mod:`hone.data.prefixes`). Rows that share one are therefore separated only where that
makes the slowest part faster. The assignment of rows never changes a result.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.data.model_settings import read_settings
from hone.data.prefixes import PrefixOrder
from hone.data.ragged import offsets_of
from hone.errors import ModelError

GOOD_ENOUGH = 1.02
"""Branches are not split further once the slowest part has at most this many times its share of perfectly balanced work."""

LEAST_GROWTH = 1.75
"""Once halving all chunks gives fewer than this many times as many, most are single rows, and all are split into those."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence."""

    # token pairs in attention that cost as much as one token in the matmuls. The default fits a dense decoder of
    # width 4096: 12 width^2 parameters per layer against 2 width multiplications per pair
    pairs_per_token: float = 24576.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CostModel:
        """Return the cost model of a decoder's ``config.json``; missing values keep the default.

        Multiplications per token and layer are its active parameters (for a mixture of experts, those of the chosen experts)
        plus the layer's share of the output matrix. A pair costs one multiplication for the score and one for the value in
        every dimension of every head.
        """
        config = {**config, **(config.get("text_config") or {})}
        hidden, heads, layers = (config.get(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        if not (hidden and heads and layers):
            return cls()
        head_dim = config.get("head_dim") or hidden // heads
        key_value_heads = config.get("num_key_value_heads") or heads
        experts = config.get("num_experts_per_tok") or 0
        width = config.get("moe_intermediate_size") if experts else None
        width = width or config.get("intermediate_size") or 4 * hidden
        width = max(width) if isinstance(width, list) else width  # Gemma 3n has one for each layer
        attention = 2 * hidden * head_dim * (heads + key_value_heads)
        output = hidden * config.get("vocab_size", 0) / layers
        return cls((attention + 3 * hidden * width * max(experts, 1) + output) / (2 * heads * head_dim))

    @classmethod
    def from_directory(cls, path: str | Path | None) -> CostModel:
        """Return the cost model of a Hugging Face directory; the default if it has no readable ``config.json``."""
        try:
            return cls.from_config(read_settings(path))
        except ModelError:
            return cls()

    def cost(self, tokens: NDArray[np.int64], pairs: NDArray[Any]) -> NDArray[np.float64]:
        return tokens + pairs / self.pairs_per_token


@dataclass(frozen=True)
class Lengths:
    """Lengths of the ``B`` rows of a batch and the prefixes that they share, the only input of balancing."""

    tokens: NDArray[np.int64]  # ``[B]`` tokens of each row, prompt and response
    prefixes: PrefixOrder  # which rows share how many tokens
    # ``[B]``, equal numbers for rows that must stay together (the two sides of a preference); None: any may split
    unit_of: NDArray[np.int64] | None = None

    @classmethod
    def from_uids(
        cls, prompts: Tensor, responses: Tensor, uids: Sequence[Hashable], units: Tensor | None = None
    ) -> Lengths:
        """Build the lengths from the uid of each row's prompt group; the rows of a group share their prompt."""
        prefixes = PrefixOrder.from_groups(uids, prompts)
        return cls((prompts + responses).numpy(), prefixes, None if units is None else units.numpy())

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, rows: NDArray[np.int64]) -> Lengths:
        units = None if self.unit_of is None else self.unit_of[rows]
        return Lengths(self.tokens[rows], self.prefixes.take(rows), units)


@dataclass(frozen=True)
class Load:
    """Work of each part; a token that rows of a part share counts once."""

    tokens: NDArray[np.int64]  # ``[parts]`` tokens that go through the model
    cost: NDArray[np.float64]  # ``[parts]`` work in tokens, attention included
    rows: NDArray[np.int64]  # ``[parts]`` number of rows

    @property
    def imbalance(self) -> float:
        """Return the work of the slowest part divided by the mean; 1 is perfect."""
        mean = float(self.cost.mean())
        return float(self.cost.max()) / mean if mean else 1.0


def load_of(lengths: Lengths, part_of: NDArray[np.int64], parts: int, model: CostModel) -> Load:
    """Return the load of each part when row i goes to part ``part_of[i]``."""
    place = lengths.prefixes.place
    order = np.lexsort((place, part_of))
    part, place = part_of[order], place[order]
    shared = np.zeros(len(order), np.int64)
    (follows,) = np.nonzero(part[1:] == part[:-1])
    if len(follows):
        shared[follows + 1] = lengths.prefixes.between(place[follows], place[follows + 1])
    added = lengths.tokens[order] - shared
    tokens = np.bincount(part, added, parts).astype(np.int64)
    pairs = np.bincount(part, _pairs(added, shared), parts)
    return Load(tokens, model.cost(tokens, pairs), np.bincount(part, minlength=parts))


def _pairs(added: NDArray[np.int64], shared: NDArray[np.int64]) -> NDArray[np.float64]:
    tokens = added.astype(np.float64)
    return tokens * shared + tokens * (tokens + 1) / 2


def balance(
    lengths: Lengths,
    parts: int,
    model: CostModel | None = None,
    *,
    equal_count: bool = False,
    max_tokens: int | None = None,
    max_rows: int | None = None,
) -> list[list[int]] | None:
    """Divide rows over ranks (or micro-batches) so that the slowest one has the least work.

    Whole trees of prefixes are tried first, then their halves, quarters, ... down to single rows, until the balance is good. The
    division with the least work in its slowest part is returned. With at least as many rows as parts, no part is empty.

    Args:
        equal_count: give every part the same number of rows, up to one.
        max_tokens: largest number of tokens of a part with several rows, shared ones counted once.

    Returns:
        Row indices of each part, rows that share a prefix next to each other; None when no division meets the limits.
    """
    model = model or CostModel()
    best, best_cost = None, np.inf
    enough = GOOD_ENOUGH * _least_cost(lengths, parts, model)
    for chunk_of in _chunkings(lengths, model):
        count = int(chunk_of.max(initial=-1)) + 1
        if count < parts and count < len(lengths):
            continue
        chunks = load_of(lengths, chunk_of, count, model)
        chosen = karmarkar_karp(chunks.cost, parts, equal_count=equal_count)
        part_of_chunk = np.empty(count, np.int64)
        for part, members in enumerate(chosen):
            part_of_chunk[members] = part
        part_of = part_of_chunk[chunk_of]
        load = load_of(lengths, part_of, parts, model)
        if equal_count and lengths.unit_of is None and load.rows.max() - load.rows.min() > 1:
            continue
        if max_rows is not None and load.rows.max() > max_rows:
            continue
        if max_tokens is not None and bool(((load.tokens > max_tokens) & (load.rows > 1)).any()):
            continue
        if load.cost.max() < best_cost:
            best, best_cost = part_of, load.cost.max()
        if best_cost <= enough:
            break
    return None if best is None else _rows_of(lengths, best, parts)


def in_order(rows: int, parts: int) -> list[list[int]]:
    """Return neighbouring rows per part, equal counts up to one: the baseline that balance is compared with."""
    bounds = [part * rows // parts for part in range(parts + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def part_of_rows(parts: Sequence[Sequence[int] | NDArray[np.int64]]) -> NDArray[np.int64]:
    part_of = np.empty(sum(map(len, parts)), np.int64)
    for part, rows in enumerate(parts):
        part_of[np.asarray(rows, np.int64)] = part
    return part_of


def balance_metrics(
    lengths: Lengths, parts: Sequence[Sequence[int] | NDArray[np.int64]], model: CostModel | None = None
) -> dict[str, float]:
    """Return the spread of tokens and work over the ranks, for rows in order (before) and for ``parts`` (after)."""
    model = model or CostModel()
    ranks = len(parts)
    before = load_of(lengths, part_of_rows(in_order(len(lengths), ranks)), ranks, model)
    after = load_of(lengths, part_of_rows(parts), ranks, model)
    return {
        "global_seqlen/min": float(before.tokens.min()),
        "global_seqlen/max": float(before.tokens.max()),
        "global_seqlen/minmax_diff": float(before.tokens.max() - before.tokens.min()),
        "global_seqlen/balanced_min": float(after.tokens.min()),
        "global_seqlen/balanced_max": float(after.tokens.max()),
        "global_seqlen/mean": float(after.tokens.mean()),
        "global_seqlen/imbalance": before.imbalance,
        "global_seqlen/balanced_imbalance": after.imbalance,
    }


def _chunkings(lengths: Lengths, model: CostModel) -> Iterator[NDArray[np.int64]]:
    """Yield ``[B]`` chunk numbers: whole trees, then each chunk split in two again and again, and at last single units."""
    prefixes, units = lengths.prefixes, _units_of(lengths)
    cuttable = _places_between_units(units[prefixes.order])
    begins = cuttable & (prefixes.shared == 0)
    begins[:1] = True
    most, count = np.count_nonzero(cuttable), 0
    while count * LEAST_GROWTH <= np.count_nonzero(begins) < most:
        count = np.count_nonzero(begins)
        chunk_of = np.empty(len(lengths), np.int64)
        chunk_of[prefixes.order] = np.cumsum(begins) - 1
        yield chunk_of
        begins[_halves(lengths, begins, cuttable, model)] = True
    yield units


def _halves(
    lengths: Lengths, begins: NDArray[np.bool_], cuttable: NDArray[np.bool_], model: CostModel
) -> NDArray[np.int64]:
    """Return the places at which to split chunks in two, so that the costlier part of each has the least work.

    Args:
        begins: ``[B]`` places where a chunk begins.
        cuttable: ``[B]`` places where one may begin.
    """
    tokens, shared = lengths.tokens[lengths.prefixes.order], lengths.prefixes.shared
    work = model.cost(tokens - shared, _pairs(tokens - shared, shared))  # of each row after the one before it
    again = model.cost(shared, _pairs(shared, np.zeros_like(shared)))  # what the first row of a chunk adds to that
    done = np.concatenate([[0.0], work.cumsum()])
    (first,) = np.nonzero(begins)
    chunk = np.cumsum(begins) - 1
    starts, ends = first[chunk], np.append(first[1:], len(begins))[chunk]
    before = done[:-1] - done[starts] + again[starts]
    after = done[ends] - done[:-1] + again
    slower = np.where(cuttable & ~begins, np.maximum(before, after), np.inf)
    best = np.lexsort((slower, chunk))[first]  # the first of each chunk, ordered by the slower half
    return best[np.isfinite(slower[best])]


def _units_of(lengths: Lengths) -> NDArray[np.int64]:
    if lengths.unit_of is None:
        return np.arange(len(lengths))
    return np.unique(lengths.unit_of, return_inverse=True)[1].reshape(-1)


def _places_between_units(units: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return ``[B]`` whether a chunk may begin at a place of ``units``: no unit has rows on both sides."""
    count, places = int(units.max(initial=-1)) + 1, np.arange(len(units))
    last = np.zeros(count, np.int64)
    np.maximum.at(last, units, places)
    inside = np.maximum.accumulate(last[units])  # the last row of the units that have begun
    return np.concatenate([[True], inside[:-1] < places[1:]]) if len(units) else np.zeros(0, bool)


def _least_cost(lengths: Lengths, parts: int, model: CostModel) -> float:
    """Return a lower bound for the work of the slowest part: an equal share of all work, every token counted once."""
    everything = load_of(lengths, np.zeros(len(lengths), np.int64), 1, model)
    return float(everything.cost[0]) / parts


def _rows_of(lengths: Lengths, part_of: NDArray[np.int64], parts: int) -> list[list[int]]:
    """Return the row indices of each part, in the order of their prefixes."""
    order = np.lexsort((lengths.prefixes.place, part_of))
    bounds = offsets_of(torch.from_numpy(np.bincount(part_of, minlength=parts))).tolist()
    rows = order.tolist()
    return [rows[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def karmarkar_karp(costs: NDArray[np.float64], parts: int, *, equal_count: bool = False) -> list[list[int]]:
    """Partition items into ``parts`` of nearly equal sum, by largest differencing.

    The method of Karmarkar and Karp (1982) for several parts: keep partial partitions, and repeatedly merge the two with the
    widest spread, heavy parts of one with light parts of the other.

    Args:
        costs: ``[n]``, positive.
        equal_count: give every part the same number of items, up to one.

    Returns:
        Item indices of each part, ascending. With ``n >= parts`` no part is empty.
    """
    follower = np.full(len(costs), -1, np.int64)  # the next item in the same part
    heap = [(-state.spread(parts), number, state) for number, state in enumerate(_first(costs, parts, equal_count))]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        widest, (_, _, second) = heapq.heappop(heap)[2], heapq.heappop(heap)
        merged = widest.merge(second, parts, follower)
        heapq.heappush(heap, (-merged.spread(parts), number, merged))
        number += 1
    partition: list[list[int]] = [[] for _ in range(parts)]
    heads = heap[0][2].heads.tolist() if heap else []
    chain = follower.tolist()
    for part, item in zip(partition, heads, strict=False):
        while item >= 0:
            part.append(item)
            item = chain[item]
        part.sort()
    return partition


@dataclass(frozen=True)
class _Partial:
    """A partition of some of the items: sums of its non-empty parts, heaviest first, and the first and last item of each."""

    sums: NDArray[np.float64]
    heads: NDArray[np.int64]
    tails: NDArray[np.int64]

    def spread(self, parts: int) -> float:
        return float(self.sums[0] - (self.sums[-1] if len(self.sums) == parts else 0.0))

    def merge(self, other: _Partial, parts: int, follower: NDArray[np.int64]) -> _Partial:
        """Merge both: part i of this one with part ``parts - 1 - i`` of the other."""
        count, others = len(self.sums), len(other.sums)
        alone, both = min(count, parts - others), max(0, count + others - parts)
        sums, heads, tails = other.sums[::-1], other.heads[::-1], other.tails[::-1]
        if both:
            follower[self.tails[alone:]] = heads[:both]
        sums_of_both = np.concatenate((self.sums[:alone], self.sums[alone:] + sums[:both], sums[both:]))
        heads = np.concatenate((self.heads, heads[both:]))
        tails = np.concatenate((self.tails[:alone], tails))
        order = np.argsort(-sums_of_both, kind="stable")
        return _Partial(sums_of_both[order], heads[order], tails[order])


def _first(costs: NDArray[np.float64], parts: int, equal_count: bool) -> Iterator[_Partial]:
    """Yield the initial partial partitions: one item each, or for equal counts one item for every part."""
    order = np.argsort(-np.asarray(costs, np.float64), kind="stable")
    size = parts if equal_count else 1
    for start in range(0, len(order), size):
        items = order[start : start + size]
        yield _Partial(np.asarray(costs, np.float64)[items], items, items)
