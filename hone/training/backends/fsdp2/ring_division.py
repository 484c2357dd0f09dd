"""Division of a packed row over the ranks of a ring, and the runs in which their tokens meet in attention.

The row is cut into blocks of equal size, and every rank gets as many of them as the others: each layer then has the same work on all
ranks, apart from attention. There a token meets as many keys as its sequence has up to it, so late blocks of a long sequence cost most.
Largest differencing gives the ranks blocks of nearly equal cost. For one sequence in two blocks a rank that is the zig-zag: rank i has
blocks i and 2n - 1 - i. A row with many sequences is balanced as well, which the zig-zag of the row is not, and short sequences stay
whole, which the zig-zag of every sequence would cut.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hone.data.partition import karmarkar_karp
from hone.data.ragged import Ragged
from hone.models.attention.partial import LONGEST_TILE, Runs
from hone.models.attention.tiles import Sequences

NONE = -1
"""In place of a token: the row has no more."""
_BLOCKS = (2, 4, 8)
"""Blocks of a rank: the first number with which the ranks have nearly equal work."""
_LEAST_BLOCK = 64
"""Tokens of a block, at least, if a rank has more than two."""
_EVEN = 1.05
"""Work of the slowest rank, divided by the mean, that is nearly equal."""


def divide_row(sequences: Sequences, ranks: int) -> Tensor:
    """Divide the tokens of a packed row over ``ranks``.

    Returns:
        ``[ranks, size]`` index in the row of each token of each rank, ascending; :data:`NONE` where a rank has fewer.
    """
    work = _positions(sequences) + 1
    best, least = None, float("inf")
    for blocks in _BLOCKS:
        size = -(-len(work) // (ranks * blocks))
        if best is not None and size < _LEAST_BLOCK:
            break
        padded = torch.nn.functional.pad(work, (0, ranks * blocks * size - len(work)))
        costs = padded.view(-1, size).sum(1)
        parts = karmarkar_karp(costs.numpy().astype(np.float64) + 1.0, ranks, equal_count=True)
        uneven = max(float(costs[part].sum()) for part in parts) / float(costs.sum()) * ranks
        if uneven < least:
            tokens = torch.arange(padded.numel()).view(-1, size)
            best, least = torch.stack([tokens[part].flatten() for part in parts]), uneven
        if least <= _EVEN:
            break
    assert best is not None
    return best.masked_fill(best >= len(work), NONE)


@dataclass(frozen=True)
class RingPlan:
    """The attention of one rank's tokens, block by block.

    Attributes:
        sequences: of the whole row.
        tokens: of all ranks, see :func:`divide_row`.
        rank: this rank.
        device: of the states.
    """

    sequences: Sequences
    tokens: Tensor
    rank: int
    device: torch.device
    _planned: dict[tuple[int | None, bool], list[Runs]] = field(default_factory=dict, repr=False)

    def runs(self, window: int | None, *, fused: bool) -> list[Runs]:
        """Return the runs of this rank's queries with the keys of each rank, by rank.

        Args:
            window: attention window of the layer; None if no sequence is longer.
            fused: whether a variable-length call computes them, or tiles, for which long runs are cut.
        """
        if (window, fused) not in self._planned:
            self._planned[window, fused] = self._plan(window, None if fused else LONGEST_TILE)
        return self._planned[window, fused]

    def _plan(self, window: int | None, longest: int | None) -> list[Runs]:
        sequences, size = self.sequences, self.tokens.shape[1]
        positions = _positions(sequences)
        owner, place = _owners(self.tokens, len(positions))
        mine = self.tokens[self.rank]
        mine = mine[mine != NONE]
        first = self._starts(mine, positions, longest)
        lengths = torch.cat([first[1:], torch.tensor([len(mine)])]) - first
        run_of = torch.arange(len(first)).repeat_interleave(lengths)
        start = positions[mine[first]]
        begin = (start - (window - 1)).clamp(min=0) if window is not None else torch.zeros_like(start)
        before = start - begin  # keys that precede a run, of all ranks
        run = torch.arange(len(first)).repeat_interleave(before)
        column = torch.arange(int(before.sum())) - (before.cumsum(0) - before).repeat_interleave(before)
        sequence = _sequence_of(sequences)[mine[first]]
        keys = sequences.packed_index(sequence[run], begin[run] + column)
        plans = []
        for rank in range(len(self.tokens)):
            here = owner[keys] == rank
            key, key_run = keys[here], run[here]
            if rank == self.rank:
                order = torch.cat([key_run, run_of]).argsort(stable=True)
                key, key_run = torch.cat([key, mine])[order], torch.cat([key_run, run_of])[order]
            key_lengths = key_run.bincount(minlength=len(first))
            used = key_lengths > 0
            query = used[run_of]
            plans.append(
                Runs(
                    queries=Ragged.from_lengths(place[mine[query]], lengths[used]),
                    keys=Ragged.from_lengths(place[key], key_lengths[used]),
                    query_positions=positions[mine[query]],
                    key_positions=positions[key],
                    within=rank == self.rank,
                    block=(size, size),
                    device=self.device,
                )
            )
        return plans

    def _starts(self, mine: Tensor, positions: Tensor, longest: int | None) -> Tensor:
        """Return where in ``mine`` runs of consecutive tokens of a sequence begin, and after each ``longest`` of them again."""
        sequence = _sequence_of(self.sequences)[mine]
        begins = torch.ones(len(mine), dtype=torch.bool)
        begins[1:] = (mine.diff() != 1) | (sequence.diff() != 0)
        if longest is not None and len(mine):
            starts = begins.nonzero()[:, 0]
            within = torch.arange(len(mine)) - starts[begins.cumsum(0) - 1]
            begins |= within % longest == 0
        return begins.nonzero()[:, 0]


def _positions(sequences: Sequences) -> Tensor:
    """Return the position of each token of the row in its sequence, ``[N]``."""
    suffixes = sequences.suffix_length
    column = torch.arange(int(suffixes.sum())) - sequences.suffix_start.repeat_interleave(suffixes)
    return sequences.prefix_length.repeat_interleave(suffixes) + column


def _sequence_of(sequences: Sequences) -> Tensor:
    """Return the sequence whose suffix each token of the row is in, ``[N]``."""
    return torch.arange(len(sequences.suffix_length)).repeat_interleave(sequences.suffix_length)


def _owners(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the rank of each of ``count`` tokens, and its place there, ``[N]`` each."""
    ranks, size = tokens.shape
    real = tokens != NONE
    owner, place = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    owner[tokens[real]] = torch.arange(ranks)[:, None].expand(ranks, size)[real]
    place[tokens[real]] = torch.arange(size).expand(ranks, size)[real]
    return owner, place
