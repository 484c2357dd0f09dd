"""Prompts in the cache, each once, for all the rows that continue it.

The samples of a group begin alike. Their prompt is computed once, kept once, and read once a step: the queries of all rows
that continue it are stacked to one product with its keys. While no two rows begin alike, each holds its prompt itself, and
none of this is in use.

    slots                      rows (what each has of its own)
    [p p p p]  <- 0, 1, 3      0 [s s s]
    [q q]      <- 2            1 [s s s]
                               2 [s]
                               3 [s s]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hone.generation.native.cache import KeyValueCache, closing_moves

_CHEAP = 256
"""Cells of a stack that cost next to nothing, taken or not."""


class Prompts:
    """The slots, each a prompt with its keys and values; those in use are ``0 .. count - 1``.

    Args:
        device: where they live.
        dtype: of the keys and values.

    Attributes:
        cache: a row a slot.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.cache = KeyValueCache(device, dtype)
        self._keys: list[tuple[bytes, int]] = []  # prompt and version of the weights, by slot
        self._lengths: list[int] = []
        self._users: list[int] = []

    @property
    def count(self) -> int:
        """Slots in use."""
        return len(self._keys)

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        return max(self._lengths, default=0)

    def take(self, prompt: bytes, version: int, length: int) -> tuple[int, bool]:
        """One more row continues this prompt, computed by weights of this version: its slot, and whether that is new."""
        key = (prompt, version)
        new = key not in self._keys
        if new:
            self._keys.append(key)
            self._lengths.append(length)
            self._users.append(0)
        slot = self._keys.index(key)
        self._users[slot] += 1
        return slot, new

    def leave(self, slots: Iterable[int]) -> dict[int, int]:
        """One row less for each of these slots; returns where slots have moved, from old to new."""
        for slot in slots:
            self._users[slot] -= 1
        gone = {slot for slot, users in enumerate(self._users) if users == 0}
        gaps, movers = closing_moves(self.count, gone)
        self.cache.copy_rows(movers, gaps, max((self._lengths[slot] for slot in movers), default=0))
        for gap, mover in zip(gaps, movers, strict=True):
            self._keys[gap], self._lengths[gap], self._users[gap] = (
                self._keys[mover],
                self._lengths[mover],
                self._users[mover],
            )
        left = self.count - len(gone)
        del self._keys[left:], self._lengths[left:], self._users[left:]
        return dict(zip(movers, gaps, strict=True))

    def clear(self) -> None:
        """No row is left."""
        self._keys, self._lengths, self._users = [], [], []


class _Stack(NamedTuple):
    """Some slots, and the rows that continue each, padded to the same number.

    Attributes:
        slots: a slice, which costs no copy of keys, or indices.
        rows: ``[slots, most rows of one]``; pads are row 0.
    """

    slots: slice | Tensor
    rows: Tensor


class Stacks:
    """Which prompt each row continues, for attention; made anew when rows enter or leave.

    One stack holds all slots, unless that would be mostly padding; then those with like numbers of rows go together.

    Args:
        slots: of each of the ``A`` rows; every slot below the largest has a row.
        prompts: their keys and values.
    """

    def __init__(self, slots: Sequence[int], prompts: Prompts) -> None:
        self._cache, self.longest = prompts.cache, prompts.longest
        slot = torch.tensor(slots)
        order = slot.argsort(stable=True)
        counts = slot.bincount()
        place = torch.empty_like(slot)
        place[order] = torch.arange(len(slot)) - (counts.cumsum(0) - counts)[slot[order]]
        self._stacks: list[_Stack] = []
        self._back = torch.empty(
            len(slot), 2, dtype=torch.int64
        )  # a row's cell: of head 0, and how far head 1 is from it
        cells = 0
        for members in _alike(counts):
            width = int(counts[members].max())
            number = torch.zeros(len(counts), dtype=torch.int64)
            number[members] = torch.arange(len(members))
            inside = torch.isin(slot, members)
            rows = torch.zeros(len(members), width, dtype=torch.int64)
            rows[number[slot[inside]], place[inside]] = inside.nonzero()[:, 0]
            everything = len(members) == len(counts)
            self._stacks.append(_Stack(slice(len(counts)) if everything else members.to(prompts.cache.device), rows))
            self._back[inside] = torch.stack([cells + number[slot[inside]] * width, place[inside]], 1)
            cells += rows.numel()
        self._lanes: dict[int, tuple[list[Tensor | None], Tensor | None]] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}

    def products(self, layer: int, lanes: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """What :func:`query_products` gives of queries with the keys of their prompts.

        Args:
            layer: of the model.
            lanes: ``[A * kv_heads, heads of one, d]`` queries.
            key: of the new token, for its shape.
            value: likewise.
            scale: of the scores.

        Returns:
            ``[A * kv_heads, heads of one, longest]``; behind a prompt's end stands anything.
        """
        gathers, back = self._for_heads(key.shape[1])
        found = []
        for keys, gather in zip(self._of_stacks(0, layer, key, value), gathers, strict=True):
            queries = _taken(lanes, gather).reshape(keys.shape[0], -1, lanes.shape[2])
            found.append(query_products(queries, keys, scale).reshape(-1, lanes.shape[1], self.longest))
        return _taken(_joined(found), back)

    def mix(self, layer: int, weights: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What the prompts' values add: contiguous ``weights [A * kv_heads, heads of one, longest]`` to ``[..., d_v]``."""
        gathers, back = self._for_heads(key.shape[1])
        found = []
        for values, gather in zip(self._of_stacks(1, layer, key, value), gathers, strict=True):
            chosen = _taken(weights, gather)
            mixed = torch.bmm(chosen.reshape(values.shape[0], -1, self.longest), values)
            found.append(mixed.reshape(-1, weights.shape[1], values.shape[2]))
        return _taken(_joined(found), back)

    def _of_stacks(self, part: int, layer: int, key: Tensor, value: Tensor) -> list[Tensor]:
        """Keys (part 0) or values (1) of each stack, ``[slots * kv_heads, longest, d]``.

        Those of all slots are a view, made once for all steps; others are copied.
        """
        if (part, layer) in self._views:
            return self._views[part, layer]
        slab = self._cache.layer(layer, key, value)[part][:, :, : self.longest]
        found = [slab[stack.slots].flatten(0, 1) for stack in self._stacks]
        if isinstance(self._stacks[0].slots, slice):
            self._views[part, layer] = found
        return found

    def _for_heads(self, kv_heads: int) -> tuple[list[Tensor | None], Tensor | None]:
        """The lane in each cell of each stack, and the cell of each lane over all stacks; None where these are the same."""
        if kv_heads not in self._lanes:
            head, in_order = torch.arange(kv_heads)[:, None], torch.arange(len(self._back) * kv_heads)
            gathers = [(s.rows[:, None] * kv_heads + head).flatten() for s in self._stacks]
            widths = torch.cat([torch.full((s.rows.numel(),), s.rows.shape[1]) for s in self._stacks])
            first, place = self._back.unbind(1)
            back = first[:, None] * kv_heads + torch.arange(kv_heads) * widths[first][:, None] + place[:, None]
            if len(gathers) == 1 and torch.equal(gathers[0], in_order):
                self._lanes[kv_heads] = [None], None
            else:
                device = self._cache.device
                self._lanes[kv_heads] = [gather.to(device) for gather in gathers], back.flatten().to(device)
        return self._lanes[kv_heads]


def query_products(queries: Tensor, keys: Tensor, scale: float) -> Tensor:
    """``queries [n, q, d]`` with ``keys [n, k, d]``: ``[n, q, k]`` in their dtype, of which :func:`scored` makes scores.

    In float32 a product takes ``scale`` along. What half precision rounds off is of products that are not scaled yet.
    """
    if keys.dtype == torch.float32:
        return torch.baddbmm(queries.new_empty(()), queries, keys.transpose(1, 2), beta=0, alpha=scale)
    return torch.bmm(queries, keys.transpose(1, 2))


def scored(products: Tensor, scale: float) -> Tensor:
    """Scores, in float32, of what :func:`query_products` gave."""
    return products if products.dtype == torch.float32 else products.float().mul_(scale)


def _alike(counts: Tensor) -> list[Tensor]:
    """Slots that go into a stack together."""
    if len(counts) * int(counts.max()) <= max(2 * int(counts.sum()), _CHEAP):
        return [torch.arange(len(counts))]
    size = counts.double().log2().ceil()
    return [(size == value).nonzero()[:, 0] for value in size.unique()]


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _taken(states: Tensor, index: Tensor | None) -> Tensor:
    return states if index is None else states.index_select(0, index)
