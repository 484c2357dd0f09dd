"""Shared prefixes in the cache: each prompt is stored once and read once a step by all rows that continue it.

The samples of a group have the same prompt. It is prefilled once into a slot, and a step computes its scores for all of
these rows in one matmul. While no two rows share a prompt, each row contains its prompt, and no slots are used.

    slots                      rows (tokens after the prompt)
    [p p p p]  <- 0, 1, 3      0 [s s s]
    [q q]      <- 2            1 [s s s]
                               2 [s]
                               3 [s s]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hone.generation.native.cache import KVCache, closing_moves

_NEGLIGIBLE_SLOTS = 256
"""Padded rows of one group below which padding costs almost nothing."""


@dataclass
class _Slot:
    """A shared prefix in the cache."""

    key: tuple[bytes, int]  # prompt and weight version
    length: int
    users: int = 0  # rows that continue it


class SharedPrefixes:
    """Slots of shared prefixes; slots ``0 .. count - 1`` are in use."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self._slots: list[_Slot] = []
        self._number_of: dict[tuple[bytes, int], int] = {}

    @property
    def count(self) -> int:
        return len(self._slots)

    @property
    def longest(self) -> int:
        return max((slot.length for slot in self._slots), default=0)

    def take(self, prompt: bytes, version: int, length: int) -> tuple[int, bool]:
        """Add one row to the users of a prompt of this version of the weights; return its slot, and whether that is new."""
        key = (prompt, version)
        new = key not in self._number_of
        if new:
            self._number_of[key] = self.count
            self._slots.append(_Slot(key, length))
        number = self._number_of[key]
        self._slots[number].users += 1
        return number, new

    def release(self, slots: Iterable[int]) -> dict[int, int]:
        """Remove one row from the users of each given slot; return the slots that have moved, from old to new."""
        for number in slots:
            self._slots[number].users -= 1
        unused = {number for number, slot in enumerate(self._slots) if slot.users == 0}
        gaps, movers = closing_moves(self.count, unused)
        self.cache.copy_rows(movers, gaps, max((self._slots[mover].length for mover in movers), default=0))
        moved = dict(zip(movers, gaps, strict=True))
        for mover, gap in moved.items():
            self._slots[gap] = self._slots[mover]
        del self._slots[self.count - len(unused) :]
        self._number_of = {slot.key: number for number, slot in enumerate(self._slots)}
        return moved

    def clear(self) -> None:
        """Drop all slots."""
        self._slots, self._number_of = [], {}


class _Group(NamedTuple):
    """Slots whose rows are scored in one batched matmul, padded to the same number of rows."""

    slots: slice | Tensor  # a slice, which needs no copy of the keys, or indices
    rows: Tensor  # ``[slots, rows of the largest slot]``; padding is row 0


class PrefixGroups:
    """Assignment of rows to shared prefixes, for attention; rebuilt when rows enter or leave.

    One group holds all slots, unless most of it would be padding; then slots with similar numbers of rows form a group.

    Args:
        slots: of each of the ``A`` rows; every slot below the largest has a row.
        prefixes: their keys and values.
    """

    def __init__(self, slots: Sequence[int], prefixes: SharedPrefixes) -> None:
        self._cache, self.longest = prefixes.cache, prefixes.longest
        slot = torch.tensor(slots)
        order = slot.argsort(stable=True)
        counts = slot.bincount()
        place = torch.empty_like(slot)
        place[order] = torch.arange(len(slot)) - (counts.cumsum(0) - counts)[slot[order]]
        self._groups: list[_Group] = []
        self._back = torch.empty(
            len(slot), 2, dtype=torch.int64
        )  # per row: index at head 0, and position within its slot
        cells = 0
        for members in _similar_counts(counts):
            width = int(counts[members].max())
            number = torch.zeros(len(counts), dtype=torch.int64)
            number[members] = torch.arange(len(members))
            inside = torch.isin(slot, members)
            rows = torch.zeros(len(members), width, dtype=torch.int64)
            rows[number[slot[inside]], place[inside]] = inside.nonzero()[:, 0]
            all_slots = len(members) == len(counts)
            self._groups.append(_Group(slice(len(counts)) if all_slots else members.to(prefixes.cache.device), rows))
            self._back[inside] = torch.stack([cells + number[slot[inside]] * width, place[inside]], 1)
            cells += rows.numel()
        self._gathers: dict[int, tuple[list[Tensor | None], Tensor | None]] = {}
        self._views: dict[tuple[bool, int], list[Tensor]] = {}

    def scores(self, layer: int, queries: Tensor, kv_heads: int, scale: float) -> Tensor:
        """Compute :func:`query_scores` of ``queries [A * kv_heads, query heads of one, d]`` with the keys of their prefixes.

        ``[A * kv_heads, query heads of one, longest]``; values after a prefix's end are arbitrary.
        """
        gathers, back = self._for_heads(kv_heads)
        outputs = []
        for keys, gather in zip(self._group_kv(False, layer), gathers, strict=True):
            gathered = _select(queries, gather).reshape(keys.shape[0], -1, queries.shape[2])
            outputs.append(query_scores(gathered, keys, scale).reshape(-1, queries.shape[1], self.longest))
        return _select(_join(outputs), back)

    def mix(self, layer: int, probabilities: Tensor, kv_heads: int) -> Tensor:
        """Weigh the prefixes' values: contiguous ``[A * kv_heads, query heads of one, longest]`` to ``[..., d_v]``."""
        gathers, back = self._for_heads(kv_heads)
        outputs = []
        for values, gather in zip(self._group_kv(True, layer), gathers, strict=True):
            gathered = _select(probabilities, gather)
            mixed = torch.bmm(gathered.reshape(values.shape[0], -1, self.longest), values)
            outputs.append(mixed.reshape(-1, probabilities.shape[1], values.shape[2]))
        return _select(_join(outputs), back)

    def _group_kv(self, values: bool, layer: int) -> list[Tensor]:
        """Return the keys or values of each group, ``[slots * kv_heads, longest, d]``.

        A group of all slots is a view, kept for all steps; other groups are copies.
        """
        if (values, layer) in self._views:
            return self._views[values, layer]
        cache = self._cache.kv_layer(layer)
        kv = (cache.values if values else cache.keys)[:, :, : self.longest]
        groups = [kv[group.slots].flatten(0, 1) for group in self._groups]
        if isinstance(self._groups[0].slots, slice):
            self._views[values, layer] = groups
        return groups

    def _for_heads(self, kv_heads: int) -> tuple[list[Tensor | None], Tensor | None]:
        """Return the row-and-head in each padded position of each group, and its inverse; None where nothing moves."""
        if kv_heads not in self._gathers:
            head, in_order = torch.arange(kv_heads)[:, None], torch.arange(len(self._back) * kv_heads)
            gathers = [(g.rows[:, None] * kv_heads + head).flatten() for g in self._groups]
            widths = torch.cat([torch.full((g.rows.numel(),), g.rows.shape[1]) for g in self._groups])
            first, place = self._back.unbind(1)
            back = first[:, None] * kv_heads + torch.arange(kv_heads) * widths[first][:, None] + place[:, None]
            if len(gathers) == 1 and torch.equal(gathers[0], in_order):
                self._gathers[kv_heads] = [None], None
            else:
                device = self._cache.device
                self._gathers[kv_heads] = [gather.to(device) for gather in gathers], back.flatten().to(device)
        return self._gathers[kv_heads]


def query_scores(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Return ``queries [n, q, d]`` times ``keys [n, k, d]``, ``[n, q, k]`` in their dtype; :func:`scaled` completes it.

    In float32 the matmul applies ``scale`` itself. In half precision the unscaled scores are rounded.
    """
    if keys.dtype == torch.float32:
        return torch.baddbmm(queries.new_empty(()), queries, keys.transpose(1, 2), beta=0, alpha=scale)
    return torch.bmm(queries, keys.transpose(1, 2))


def scaled(scores: Tensor, scale: float) -> Tensor:
    """Return the scaled scores in float32, from the result of :func:`query_scores`."""
    return scores if scores.dtype == torch.float32 else scores.float().mul_(scale)


def _similar_counts(counts: Tensor) -> list[Tensor]:
    if len(counts) * int(counts.max()) <= max(2 * int(counts.sum()), _NEGLIGIBLE_SLOTS):
        return [torch.arange(len(counts))]
    size = counts.double().log2().ceil()
    return [(size == value).nonzero()[:, 0] for value in size.unique()]


def _join(outputs: list[Tensor]) -> Tensor:
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _select(states: Tensor, index: Tensor | None) -> Tensor:
    return states if index is None else states.index_select(0, index)
