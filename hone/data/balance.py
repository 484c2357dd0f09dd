"""Balance: which rows of a batch go to which rank, or into which micro-batch, so that all have the same work.

Work is counted in tokens: those that go through the matrices, and the pairs that meet in attention, which grow with the
square of the length. The rows of a prompt group share their prompt when they stay together, and then it is work only once;
so a group is cut only where that makes the slowest part faster. Where a row goes never changes a result.
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
"""Groups are not cut further once the slowest part has at most this many times the work that perfect balance would give it."""


@dataclass(frozen=True)
class CostModel:
    """How much work a sequence is.

    Attributes:
        pairs_per_token: so many pairs of tokens in attention cost as much as one token in the matrices. The default is that of
            a dense decoder of width 4096: 12 width^2 parameters a layer against 2 width multiplications a pair.
    """

    pairs_per_token: float = 24576.0

    @classmethod
    def of_model(cls, config: Mapping[str, Any]) -> CostModel:
        """The model of a decoder from its ``config.json``; what the file does not say is taken from the default.

        Multiplications a token and layer are the parameters that it meets (of a mixture of experts the chosen ones) and the
        layer's share of the output matrix; a pair costs one multiplication for the score and one for the value in every
        dimension of every head.
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
    def of_directory(cls, path: str | Path | None) -> CostModel:
        """The model of the decoder in a Hugging Face directory; the default when it has no readable ``config.json``."""
        try:
            return cls.of_model(json.loads((Path(path or "") / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return cls()

    def cost(self, tokens: NDArray[np.int64], pairs: NDArray[Any]) -> NDArray[np.float64]:
        """Work in tokens."""
        return tokens + pairs / self.pairs_per_token


@dataclass(frozen=True)
class Lengths:
    """What balance needs to know of the ``B`` rows of a batch: numbers only, no tokens.

    Attributes:
        prompts: ``[B]`` tokens of each row's prompt.
        responses: ``[B]`` tokens of each response.
        group_of: ``[B]``, rows with equal numbers have the same prompt.
        unit_of: ``[B]``, rows with equal numbers are never parted (the two sides of a preference); None parts any two.
    """

    prompts: Tensor
    responses: Tensor
    group_of: Tensor
    unit_of: Tensor | None = None

    @classmethod
    def of(cls, prompts: Tensor, responses: Tensor, uids: Sequence[Hashable], units: Tensor | None = None) -> Lengths:
        """From the uid of each row's prompt group."""
        numbers: dict[Hashable, int] = {}
        return cls(prompts, responses, torch.tensor([numbers.setdefault(uid, len(numbers)) for uid in uids]), units)

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True)
class Load:
    """What each of some parts has to do, a prompt counted once in every part that has rows of it.

    Attributes:
        tokens: ``[parts]`` that go through the model.
        cost: ``[parts]`` work in tokens, attention included.
        rows: ``[parts]``.
    """

    tokens: NDArray[np.int64]
    cost: NDArray[np.float64]
    rows: NDArray[np.int64]

    @property
    def imbalance(self) -> float:
        """Work of the slowest part over the mean; 1 is perfect."""
        mean = float(self.cost.mean())
        return float(self.cost.max()) / mean if mean else 1.0


def load_of(lengths: Lengths, part_of: NDArray[np.int64], parts: int, model: CostModel) -> Load:
    """The load of each part when row i goes to part ``part_of[i]``."""
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
    """Divide rows over ranks (or micro-batches) so that the slowest has the least to do.

    Whole groups are tried first, then halves, quarters, ... down to single rows, until the balance is good; of all that were
    tried the one with the least work in its slowest part is taken. With at least as many rows as parts no part is empty.

    Args:
        lengths: of the rows.
        parts: how many ranks or micro-batches.
        model: of the work; None takes that of a dense decoder of width 4096.
        equal_count: every part gets the same number of rows, up to one.
        max_tokens: a part of several rows has at most this many tokens, shared prompts counted once.
        max_rows: a part has at most this many rows.

    Returns:
        Row indices of each part, rows of one prompt side by side; None when no division keeps within the limits.
    """
    model = model or CostModel()
    best, best_cost = None, np.inf
    enough = GOOD_ENOUGH * _least_cost(lengths, parts, model)
    for piece_of in _pieces(lengths):
        count = int(piece_of.max(initial=-1)) + 1
        if count < parts and count < len(lengths):
            continue
        pieces = load_of(lengths, piece_of, count, model)
        chosen = karmarkar_karp(pieces.cost, parts, equal_count=equal_count)
        part_of_piece = np.empty(count, np.int64)
        for part, members in enumerate(chosen):
            part_of_piece[members] = part
        part_of = part_of_piece[piece_of]
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
    """Neighbouring rows together, equally many in each part up to one: what balance is compared with."""
    bounds = [part * rows // parts for part in range(parts + 1)]
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:], strict=False)]


def part_of_rows(parts: Sequence[Sequence[int] | NDArray[np.int64]]) -> NDArray[np.int64]:
    """``[B]``, of each row the part that it stands in."""
    part_of = np.empty(sum(map(len, parts)), np.int64)
    for part, rows in enumerate(parts):
        part_of[np.asarray(rows, np.int64)] = part
    return part_of


def balance_metrics(
    lengths: Lengths, parts: Sequence[Sequence[int] | NDArray[np.int64]], model: CostModel | None = None
) -> dict[str, float]:
    """How far ranks are apart, in tokens and in work, with rows in order (before) and with ``parts`` (after)."""
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


def _pieces(lengths: Lengths) -> Iterator[NDArray[np.int64]]:
    """``[B]`` numbers of the pieces that stay together: whole groups, then groups cut in 2, 4, ..., then every unit alone."""
    units = np.arange(len(lengths)) if lengths.unit_of is None else _numbered(lengths.unit_of)
    _, first = np.unique(units, return_index=True)
    group_of = _numbered(lengths.group_of)[first]  # of each unit
    order = np.argsort(group_of, kind="stable")
    counts = np.bincount(group_of)
    starts = offsets_of(torch.from_numpy(counts)).numpy()[:-1]
    place = np.empty(len(order), np.int64)  # of each unit in its group
    place[order] = np.arange(len(order)) - np.repeat(starts, counts)
    cuts, most = 1, int(counts.max(initial=1))
    while True:
        piece = place * min(cuts, most) // np.maximum(counts[group_of], 1) if cuts < most else place
        yield _numbered(torch.from_numpy(group_of * most + piece))[units]
        if cuts >= most:
            return
        cuts *= 2


def _least_cost(lengths: Lengths, parts: int, model: CostModel) -> float:
    """What the slowest part has at least to do: its share of all work with every prompt counted once."""
    everything = load_of(lengths, np.zeros(len(lengths), np.int64), 1, model)
    return float(everything.cost[0]) / parts


def _rows_of(lengths: Lengths, part_of: NDArray[np.int64], parts: int) -> list[list[int]]:
    """Row indices of each part, by group and row."""
    order = np.lexsort((_numbered(lengths.group_of), part_of))
    bounds = offsets_of(torch.from_numpy(np.bincount(part_of, minlength=parts))).tolist()
    rows = order.tolist()
    return [rows[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def _numbered(values: Tensor) -> NDArray[np.int64]:
    """The same classes, numbered from 0 on in the order of first appearance."""
    _, first, inverse = np.unique(values.numpy(), return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    return rank[inverse.reshape(-1)]
