"""Gather packed sequences into the padded tiles of :mod:`hone.models.attention.cpu`, head by head.

In a tile, suffixes begin in one column, and prefixes end in the column before it:

    keys        . . p p p | s s s s        columns before a prefix (.) are masked
    queries                 s s s s        prefixes have no queries here: the sequence that owns them computes their outputs
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hone.models.attention.tiles import Sequences, pack_tiles, score_count

KEY_SLOTS = 1 << 14
"""Key slots that a tile may always have; more only up to twice the packed tokens, because each sequence gathers its prefix again."""


@dataclass(frozen=True)
class CausalTile:
    """Sequences of similar lengths."""

    rows: int  # number of sequences
    prefix_width: int  # columns for prefixes
    width: int  # columns for suffixes
    queries: Tensor  # ``[rows * width]`` packed token in each query slot; padding repeats a token of its own sequence
    keys: Tensor  # ``[rows * (prefix_width + width)]`` packed token in each key slot
    hidden: Tensor | None  # ``[rows, prefix_width]`` True where no prefix token is, or None if every column is used


class HeadTile(NamedTuple):
    """A tile with one batch entry for each pair of a sequence and a key head."""

    shape: tuple[int, int, int]  # batch entries, query heads of a key head, queries
    prefix_width: int  # key columns of the prefix; those of the suffix follow
    queries: Tensor  # row of ``query.flatten(0, 1)`` in each slot of ``shape``
    keys: Tensor  # row of ``key.flatten(0, 1)`` in each key slot
    # ``[batch, 1, prefix_width]`` minus infinity where no token is, else 0; None if every column is used
    hidden: Tensor | None


class HeadTiles(NamedTuple):
    """All tiles, and for each row of ``query.flatten(0, 1)`` its slot, counted over all tiles."""

    tiles: list[HeadTile]
    slot_of: Tensor

    @property
    def slots(self) -> int:
        return sum(tile.queries.numel() for tile in self.tiles)

    def split(self, slots: Tensor) -> Iterator[tuple[HeadTile, Tensor]]:
        """Each tile with its part of ``slots [slots, d]``."""
        yield from zip(self.tiles, slots.split([tile.queries.numel() for tile in self.tiles]), strict=True)


class CausalTiles:
    """The tiles of packed sequences; computed once for all layers."""

    def __init__(self, sequences: Sequences) -> None:
        self.tiles: list[CausalTile] = []
        tokens = int(sequences.suffix_length.sum())
        self._slot = torch.empty(
            tokens, 2, dtype=torch.int64
        )  # first slot of the token's tile, and slot within the tile
        self._width = torch.empty(tokens, dtype=torch.int64)
        self._for_heads: dict[tuple[int, int], HeadTiles] = {}
        slots = 0
        lengths = sequences.suffix_length.tolist(), sequences.prefix_length.tolist()
        limit = max(KEY_SLOTS, 2 * tokens)
        for rows in pack_tiles(*lengths, score_count):
            members = torch.tensor(rows)
            keys = len(rows) * int(sequences.prefix_length[members].max() + sequences.suffix_length[members].max())
            for part in members.chunk(-(-keys // limit)):
                slots += self._add_tile(sequences, part, slots)

    @property
    def fullness(self) -> float:
        """Share of the query slots that hold a token of their own."""
        return len(self._slot) / sum(tile.rows * tile.width for tile in self.tiles)

    def for_heads(self, heads: int, kv_heads: int) -> HeadTiles:
        if (heads, kv_heads) not in self._for_heads:
            self._for_heads[heads, kv_heads] = self._with_heads(heads, kv_heads)
        return self._for_heads[heads, kv_heads]

    def _add_tile(self, sequences: Sequences, members: Tensor, slots: int) -> int:
        """Add the tile of these sequences, before which there are ``slots`` query slots; returns its query slots."""
        members = members[:, None]
        prefix_length, suffix_length = sequences.prefix_length[members], sequences.suffix_length[members]
        prefix_width, width = int(prefix_length.max()), int(suffix_length.max())
        column = torch.arange(width)
        suffix = sequences.packed_index(members, prefix_length + torch.minimum(column, suffix_length - 1))
        place = torch.arange(prefix_width) - (prefix_width - prefix_length)
        prefix = sequences.packed_index(members, torch.where(place < 0, prefix_length, place))
        real = column < suffix_length
        self._slot[suffix[real], 0] = slots
        self._slot[suffix[real], 1] = torch.arange(suffix.numel()).view_as(suffix)[real]
        self._width[suffix[real]] = width
        hidden = place < 0
        keys = torch.cat([prefix, suffix], 1).flatten()
        hidden_or_none = hidden if bool(hidden.any()) else None
        self.tiles.append(CausalTile(len(suffix), prefix_width, width, suffix.flatten(), keys, hidden_or_none))
        return suffix.numel()

    def _with_heads(self, heads: int, kv_heads: int) -> HeadTiles:
        head, tiles = torch.arange(heads), []
        for tile in self.tiles:
            queries = tile.queries.view(tile.rows, 1, -1) * heads + head[:, None]
            keys = tile.keys.view(tile.rows, 1, -1) * kv_heads + torch.arange(kv_heads)[:, None]
            hidden = None
            if tile.hidden is not None:
                bias = torch.zeros(tile.hidden.shape).masked_fill_(tile.hidden, float("-inf"))
                hidden = bias.repeat_interleave(kv_heads, 0)[:, None]
            shape = (tile.rows * kv_heads, heads // kv_heads, tile.width)
            tiles.append(HeadTile(shape, tile.prefix_width, queries.flatten(), keys.flatten(), hidden))
        row, place = self._slot[:, 1] // self._width, self._slot[:, 1] % self._width
        first = self._slot[:, 0] + row * self._width
        slot_of = first[:, None] * heads + head * self._width[:, None] + place[:, None]
        return HeadTiles(tiles, slot_of.flatten())
