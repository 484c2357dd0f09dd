"""Balance the work of a batch: assign rows to ranks or micro-batches.

Work is counted in tokens of the matmuls plus token pairs of attention, which grow with the square of the length. Rows of a
prompt group that stay together compute their prompt once. A group is therefore split only where that makes the slowest
part faster. The assignment of rows never changes a result.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.data.partition import karmarkar_karp
from hone.data.ragged import offsets_of

GOOD_ENOUGH = 1.02
"""Groups are not split further once the slowest part has at most this many times its share of perfectly balanced work."""


@dataclass(frozen=True)
class CostModel:
    """Cost of a sequence.

    Attributes:
        pairs_per_token: token pairs in attention that cost as much as one token in the matmuls. The default fits a
            dense decoder of width 4096: 12 width^2 parameters per layer against 2 width multiplications per pair.
    """

    pairs_per_token: float = 24576.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CostModel:
        """Return the cost model of a decoder's ``config.json``; missing values keep the default.

        Multiplications per token and layer are its active parameters (for a mixture of experts, those of the chosen experts)
        plus the layer's share of the output matrix. A pair costs one multiplication for the score and one for the value in
        every dimension of every head.
        """
        config = {**config, **config.get("text_config", {})}
        hidden, heads, layers = (config.get(key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
        if not (hidden and heads and layers):
            return cls()
        head_dim = config.get("head_dim") or hidden // heads
        key_value_heads = config.get("num_key_value_heads") or heads
        experts = config.get("num_experts_per_tok") or 0
        width = config.get("moe_intermediate_size") if experts else None
        width = width or config.get("intermediate_size") or 4 * hidden
        attention = 2 * hidden * head_dim * (heads + key_value_heads)
        output = hidden * config.get("vocab_size", 0) / layers
        return cls((attention + 3 * hidden * width * max(experts, 1) + output) / (2 * heads * head_dim))

    @classmethod
    def from_directory(cls, path: str | Path | None) -> CostModel:
        """Return the cost model of a Hugging Face directory; the default if it has no readable ``config.json``."""
        try:
            return cls.from_config(json.loads((Path(path or "") / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return cls()

    def cost(self, tokens: NDArray[np.int64], pairs: NDArray[Any]) -> NDArray[np.float64]:
        """Return the work in tokens."""
        return tokens + pairs / self.pairs_per_token


@dataclass(frozen=True)
class Lengths:
    """Lengths of the ``B`` rows of a batch, the only input of balancing.

    Attributes:
        prompts: ``[B]`` tokens of each row's prompt.
        responses: ``[B]`` tokens of each response.
        group_of: ``[B]``, equal numbers for rows with the same prompt.
        unit_of: ``[B]``, equal numbers for rows that must stay together (the two sides of a preference); None: any may split.
    """

    prompts: Tensor
    responses: Tensor
    group_of: Tensor
    unit_of: Tensor | None = None

    @classmethod
    def from_uids(
        cls, prompts: Tensor, responses: Tensor, uids: Sequence[Hashable], units: Tensor | None = None
    ) -> Lengths:
        """Build the lengths from the uid of each row's prompt group."""
        numbers: dict[Hashable, int] = {}
        return cls(prompts, responses, torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids]), units)

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Load:
    """Work of each part; a prompt counts once in every part that has rows of it.

    Attributes:
        tokens: ``[parts]`` tokens that go through the model.
        cost: ``[parts]`` work in tokens, attention included.
        rows: ``[parts]`` number of rows.
    """

    tokens: NDArray[np.int64]
    cost: NDArray[np.float64]
    rows: NDArray[np.int64]

    @property
    def imbalance(self) -> float:
        """Return the work of the slowest part divided by the mean; 1 is perfect."""
        mean = float(self.cost.mean())
        return float(self.cost.max()) / mean if mean else 1.0


def load_of(lengths: Lengths, part_of: NDArray[np.int64], parts: int, model: CostModel) -> Load:
    """Return the load of each part when row i goes to part ``part_of[i]``."""
    prompts, responses = lengths.prompts.numpy(), lengths.responses.numpy()
    groups = _numbered(lengths.group_of)
    _, first = np.unique(part_of * (int(groups.max(initial=0)) + 1) + groups, return_index=True)
    tokens = np.bincount(part_of, responses, parts) + np.bincount(part_of[first], prompts[first], parts)
    p, r = prompts.astype(np.float64), responses.astype(np.float64)
    pairs = np.bincount(part_of, r * p + r * (r + 1) / 2, parts)
    pairs += np.bincount(part_of[first], (p * (p + 1) / 2)[first], parts)
    rows = np.bincount(part_of, minlength=parts)
    return Load(tokens.astype(np.int64), model.cost(tokens.astype(np.int64), pairs), rows)


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

    Whole groups are tried first, then halves, quarters, ... down to single rows, until the balance is good. The division with
    the least work in its slowest part is returned. With at least as many rows as parts, no part is empty.

    Args:
        lengths: lengths of the rows.
        parts: number of ranks or micro-batches.
        model: cost of the work; None: a dense decoder of width 4096.
        equal_count: give every part the same number of rows, up to one.
        max_tokens: largest number of tokens of a part with several rows, shared prompts counted once.
        max_rows: largest number of rows of a part.

    Returns:
        Row indices of each part, rows of one prompt next to each other; None when no division meets the limits.
    """
    model = model or CostModel()
    best, best_cost = None, np.inf
    enough = GOOD_ENOUGH * _least_cost(lengths, parts, model)
    for chunk_of in _chunkings(lengths):
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
    """Return ``[B]``, the part of each row."""
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


def _chunkings(lengths: Lengths) -> Iterator[NDArray[np.int64]]:
    """Yield ``[B]`` chunk numbers: whole groups, then groups split in 2, 4, ..., then single units."""
    units = np.arange(len(lengths)) if lengths.unit_of is None else _numbered(lengths.unit_of)
    _, first = np.unique(units, return_index=True)
    group_of = _numbered(lengths.group_of)[first]  # group of each unit
    order = np.argsort(group_of, kind="stable")
    counts = np.bincount(group_of)
    starts = offsets_of(torch.from_numpy(counts)).numpy()[:-1]
    place = np.empty(len(order), np.int64)  # position of each unit in its group
    place[order] = np.arange(len(order)) - np.repeat(starts, counts)
    cuts, most = 1, int(counts.max(initial=1))
    while True:
        chunk = place * min(cuts, most) // np.maximum(counts[group_of], 1) if cuts < most else place
        yield _numbered(torch.from_numpy(group_of * most + chunk))[units]
        if cuts >= most:
            return
        cuts *= 2


def _least_cost(lengths: Lengths, parts: int, model: CostModel) -> float:
    """Return a lower bound for the work of the slowest part: an equal share of all work, every prompt counted once."""
    everything = load_of(lengths, np.zeros(len(lengths), np.int64), 1, model)
    return float(everything.cost[0]) / parts


def _rows_of(lengths: Lengths, part_of: NDArray[np.int64], parts: int) -> list[list[int]]:
    """Return the row indices of each part, sorted by group and row."""
    order = np.lexsort((_numbered(lengths.group_of), part_of))
    bounds = offsets_of(torch.from_numpy(np.bincount(part_of, minlength=parts))).tolist()
    rows = order.tolist()
    return [rows[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def _numbered(values: Tensor) -> NDArray[np.int64]:
    """Renumber the classes from 0 in the order of first appearance."""
    _, first, inverse = np.unique(values.numpy(), return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]
