"""Group packed sequences of similar length into padded tiles.

Attention kernels want rectangular tensors ``[rows, heads, width, head_dim]``; packed sequences have different lengths. A padded
tile holds sequences whose lengths are close enough that little of it is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hone.data.ragged import Ragged

LEAST_FULL_PERCENT = 85
"""Smallest share of a tile that real entries fill."""


@dataclass(frozen=True)
class Sequences:
    """``B`` sequences within one row of ``N`` packed tokens, which may share prefixes at any depth.

    A sequence is a prefix, whose tokens belong to earlier sequences, followed by its suffix. Every packed token is in the suffix
    of exactly one sequence, and the suffixes follow one another in the row:

        row            a b c d e | f g | h i
        sequence 0     a b c d e
        sequence 1     a b c       f g              shares three tokens with sequence 0
        sequence 2     a b c       f     h i        shares four tokens with sequence 1
    """

    prefixes: Ragged  # packed tokens of each prefix
    suffix_start: Tensor  # ``[B]`` index of the first suffix token
    suffix_length: Tensor  # ``[B]`` number of suffix tokens, at least 1

    @classmethod
    def from_shared(cls, lengths: Tensor, shared: Tensor) -> Sequences:
        """Lay out sequences of ``lengths [B]`` tokens, of which the first ``shared [B]`` are those of the sequence before.

        Raises:
            ValueError: there is no sequence, a suffix is empty, or a prefix is longer than the sequence before.
        """
        suffixes = lengths - shared
        before = torch.nn.functional.pad(lengths, (1, 0))[:-1]
        if len(lengths) == 0 or int(suffixes.min()) < 1 or bool((shared > before).any()) or int(shared.min()) < 0:
            raise ValueError(
                "every packed sequence needs at least one token of its own, and shares tokens with the sequence before it; "
                f"lengths are {lengths.tolist()}, shared tokens {shared.tolist()}"
            )
        starts = suffixes.cumsum(0) - suffixes
        path, prefixes = torch.empty(0, dtype=torch.int64), []
        if int(shared.max()):
            for start, suffix, count in zip(starts.tolist(), suffixes.tolist(), shared.tolist(), strict=True):
                prefixes.append(path[:count])
                path = torch.cat([path[:count], torch.arange(start, start + suffix)])
        return cls(Ragged.from_lengths(torch.cat([path[:0], *prefixes]), shared), starts, suffixes)

    @property
    def prefix_length(self) -> Tensor:
        return self.prefixes.lengths

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, its prefix included, ``[B]``."""
        return self.prefix_length + self.suffix_length

    def packed_index(self, sequence: Tensor, position: Tensor) -> Tensor:
        """Return the index in the row of the tokens at ``position`` of ``sequence``; both broadcast to the shape of the result."""
        in_suffix = position - self.prefix_length[sequence]
        suffix = self.suffix_start[sequence] + in_suffix
        if not len(self.prefixes.values):
            return suffix
        entry = self.prefixes.offsets[sequence] + torch.where(in_suffix < 0, position, 0)
        prefix = self.prefixes.values[entry.clamp(max=len(self.prefixes.values) - 1)]
        return torch.where(in_suffix < 0, prefix, suffix)


def token_count(suffix: int, prefix: int) -> int:
    """Measure a sequence by its suffix tokens."""
    del prefix
    return suffix


def score_count(suffix: int, prefix: int) -> int:
    """Measure a sequence by the attention scores of its suffix tokens, the causal mask ignored."""
    return suffix * (suffix + prefix)


def pack_tiles(
    suffixes: list[int], prefixes: list[int] | None = None, measure: Callable[[int, int], int] = token_count
) -> list[list[int]]:
    """Group sequences into as few tiles as keep each at least 85 % full, from the longest suffix to the shortest.

    A tile has the longest suffix and the longest prefix of its members. Sequences with and without a prefix never share a
    tile. ``measure`` is the size of a sequence, and of a slot of the tile, from its suffix and prefix tokens.
    """
    prefixes = prefixes or [0] * len(suffixes)
    tiles: list[list[int]] = []
    filled = longest_suffix = longest_prefix = 0
    for row in _longest_first(suffixes, prefixes):
        suffix, prefix = suffixes[row], prefixes[row]
        size, widest = measure(suffix, prefix), max(longest_prefix, prefix)
        slots = (len(tiles[-1]) + 1) * measure(longest_suffix, widest) if tiles else 0
        without_prefix_begins = longest_prefix > 0 and not prefix
        if not tiles or without_prefix_begins or 100 * (filled + size) < LEAST_FULL_PERCENT * slots:
            tiles.append([])
            filled, widest, longest_suffix = 0, prefix, suffix
        tiles[-1].append(row)
        filled, longest_prefix = filled + size, widest
    return tiles


def _longest_first(suffixes: list[int], prefixes: list[int]) -> Iterable[int]:
    return sorted(
        range(len(suffixes)), key=lambda row: (not prefixes[row], -suffixes[row], -prefixes[row], row)
    )  # fmt: skip


@dataclass(frozen=True)
class PaddedTile:
    """Whole sequences (prefix and suffix) of similar length, padded on the right."""

    rows: int  # number of sequences
    width: int  # tokens of the longest
    source: Tensor  # ``[rows * width]`` packed token in each slot; padding repeats the last token of its own sequence

    def gather(self, states: Tensor) -> Tensor:
        """Gather packed ``states [N, ...]`` to ``[rows, width, ...]``."""
        return states.index_select(0, self.source).view(self.rows, self.width, *states.shape[1:])


@dataclass(frozen=True)
class PaddedTiles:
    """All sequences of a packed row as padded tiles."""

    tiles: list[PaddedTile]
    slot_of: Tensor  # ``[N]`` slot, counted over all tiles, that holds each packed token

    @classmethod
    def from_sequences(cls, sequences: Sequences, device: torch.device) -> PaddedTiles:
        """Group ``sequences`` by their total length."""
        lengths, prefix_lengths = sequences.lengths, sequences.prefix_length
        slot_of = torch.empty(int(sequences.suffix_length.sum()), dtype=torch.int64)
        tiles, slots = [], 0
        for members in map(torch.tensor, pack_tiles(lengths.tolist())):
            length = lengths[members][:, None]
            column = torch.arange(int(length.max()))
            token = sequences.packed_index(members[:, None], torch.minimum(column, length - 1))
            in_suffix = (column >= prefix_lengths[members][:, None]) & (column < length)
            slot_of[token[in_suffix]] = slots + torch.arange(token.numel()).view_as(token)[in_suffix]
            slots += token.numel()
            tiles.append(PaddedTile(token.shape[0], token.shape[1], token.flatten().to(device)))
        return cls(tiles, slot_of.to(device))

    def scatter(self, results: list[Tensor]) -> Tensor:
        """Take each packed token's result from its slot: ``[rows, width, ...]`` of each tile to ``[N, ...]``."""
        return torch.cat([result.flatten(0, 1) for result in results]).index_select(0, self.slot_of)
