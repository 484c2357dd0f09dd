"""Ring attention over packed rows (Liu et al. 2023, arXiv:2310.01889): context parallelism that no number of heads limits.

Each rank of a ring has some tokens of the packed row (:func:`divide_row`), in attention too. Keys and values travel: in every step a rank
passes the block that it has to the next rank, and meanwhile its queries meet that block. Partial results add up by their log-sum-exps
(:mod:`hone.models.attention.partial`). In the backward pass the blocks travel again, and with each of them its gradient, to which every
rank adds; after the last step it is home.

The context parallelism of torch (``torch.distributed.tensor.experimental.context_parallel``, 2.13) replaces SDPA of one causal sequence per
row with CUDA's kernels. It has no cumulative lengths of packed sequences, no prefixes that sequences share and no CPU, and its path by
FlexAttention all-gathers keys and values. Hence this module.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.data.balance import karmarkar_karp
from hone.data.ragged import Ragged
from hone.errors import ModelError
from hone.models.attention import partial, varlen
from hone.models.attention.context import Scoring
from hone.models.attention.partial import LONGEST_TILE, Incoming, Runs, Totals
from hone.models.attention.tiles import Sequences
from hone.models.devices import compute_dtype

NONE = -1  # in place of a token: the row has no more
_BLOCKS = (2, 4, 8)  # blocks of a rank: the first number with which the ranks have nearly equal work
_LEAST_BLOCK = 64  # tokens of a block, at least, if a rank has more than two
_EVEN = 1.05  # work of the slowest rank, divided by the mean, that is nearly equal


def divide_row(sequences: Sequences, ranks: int) -> Tensor:
    """Divide the tokens of a packed row over ``ranks``.

    The row is cut into blocks of equal size, and every rank gets as many of them as the others: each layer then has the same work on all
    ranks, apart from attention. There a token meets as many keys as its sequence has up to it, so late blocks of a long sequence cost most.
    Largest differencing gives the ranks blocks of nearly equal cost. For one sequence in two blocks a rank that is the zig-zag: rank i has
    blocks i and 2n - 1 - i. A row with many sequences is balanced as well, which the zig-zag of the row is not, and short sequences stay
    whole, which the zig-zag of every sequence would cut.

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
    """The attention of one rank's tokens, block by block."""

    sequences: Sequences
    tokens: Tensor  # of all ranks, see :func:`divide_row`
    rank: int
    device: torch.device  # of the states
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
    return torch.arange(len(sequences.suffix_length)).repeat_interleave(sequences.suffix_length)


def _owners(tokens: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the rank of each of ``count`` tokens, and its place there, ``[N]`` each."""
    ranks, size = tokens.shape
    real = tokens != NONE
    owner, place = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    owner[tokens[real]] = torch.arange(ranks)[:, None].expand(ranks, size)[real]
    place[tokens[real]] = torch.arange(size).expand(ranks, size)[real]
    return owner, place


BLOCK = "actor_rollout_ref.actor"
SIZE_KEY = f"{BLOCK}.context_parallel_size"


class Ring(Protocol):
    """Ranks in a circle."""

    rank: int
    size: int

    def shift(self, tensors: Sequence[Tensor], channel: int) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next rank; return a function that waits for those of the rank before, of the
        same shapes. ``channel``: number of the stream of messages; in each, messages keep their order.
        """
        ...


class ProcessRing:
    """The ring of a process group."""

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group
        self._next, self._before = (
            dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, self.size - 1)
        )

    def shift(self, tensors: Sequence[Tensor], channel: int) -> Callable[[], list[Tensor]]:
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        operations = []
        for number, (tensor, place) in enumerate(zip(sent, received, strict=True)):
            tag = channel * len(sent) + number
            operations.append(dist.P2POp(dist.isend, tensor, self._next, self._group, tag))
            operations.append(dist.P2POp(dist.irecv, place, self._before, self._group, tag))
        works = dist.batch_isend_irecv(operations)

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            sent.clear()
            return received

        return wait


@dataclass(frozen=True)
class RingContext:
    """Attention context of one rank's tokens of a row."""

    position_ids: Tensor  # ``[1, n]`` of this rank's tokens; 0 where it has fewer
    tokens: Tensor  # ``[n]`` index of each in the row, on the CPU; see :func:`divide_row`
    longest: int  # tokens of the longest sequence of the row
    plan: RingPlan
    ring: Ring

    @classmethod
    def from_row(cls, position_ids: Tensor, sequences: Sequences, ring: Ring) -> RingContext:
        """Divide a row; ``position_ids`` are ``[1, N]``, of the whole row."""
        tokens = divide_row(sequences, ring.size)
        mine, device = tokens[ring.rank], position_ids.device
        positions = position_ids[:, mine.clamp(min=0).to(device)].masked_fill((mine == NONE).to(device), 0)
        plan = RingPlan(sequences, tokens, ring.rank, device)
        return cls(positions, mine, int(sequences.lengths.max()), plan, ring)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute attention of this rank's tokens: ``[1, heads, n, head_dim]`` to ``[1, n, heads, head_dim]``. Collective.

        Raises ModelError: the model has attention dropout.
        """
        del layer
        check_dropout(scoring.dropout)
        if scoring.window is not None and scoring.window >= self.longest:
            scoring = dataclasses.replace(scoring, window=None)
        rows = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
        fused = False
        if query.device.type != "cpu":
            obstacle = partial.obstacle(query, value, scoring)
            fused = obstacle is None
            if obstacle is None:
                rows = [states.to(compute_dtype(query)) for states in rows]
            else:
                varlen.report_padding(obstacle)
        rows = [states.contiguous() for states in rows]
        return ring_attention(rows[0], rows[1], rows[2], scoring, self.plan, self.ring, fused=fused)[None]

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Raise ModelError: only softmax attention adds up from parts."""
        raise ModelError(
            "the model has layers without softmax attention, which context parallelism does not support",
            why="partial results of softmax attention add up; those of other layers do not",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )


def check_dropout(dropout: float, key: str = SIZE_KEY) -> None:
    """Raise ModelError if a model has dropout of attention probabilities."""
    if dropout:
        raise ModelError(
            f"the model has attention_dropout={dropout}, which ring attention does not support",
            why="each rank computes a part of a query's attention, and their draws would differ from those of one process",
            where=key,
            fix=f"model.dropout=false, or {key}=1",
        )


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, plan: RingPlan, ring: Ring, *, fused: bool
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks. Collective, in the backward pass too.

    Args:
        query: ``[n, heads, d]``.
        key: ``[n, kv_heads, d]``; query head ``i`` uses key head ``i // (heads / kv_heads)``.
        value: ``[n, kv_heads, d_v]``.
        fused: whether each block is one variable-length call; else tiles.

    Returns:
        ``[n, heads, d_v]`` in the dtype of ``value``; 0 where there is no token.
    """
    return _RingAttention.apply(query, key, value, scoring.sinks, scoring, plan, ring, fused)  # type: ignore[return-value]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        scoring: Scoring,
        plan: RingPlan,
        ring: Ring,
        fused: bool,
    ) -> Tensor:
        runs = plan.runs(scoring.window, fused=fused)
        totals, block = Totals.empty(query, value), [key, value]
        for step in range(ring.size):
            arriving = ring.shift(block, 0) if step + 1 < ring.size else None
            part = runs[(ring.rank - step) % ring.size]
            partial.add_part(totals, query, block[0], block[1], scoring, part, fused=fused)
            if arriving is not None:
                block = arriving()
        if sinks is not None:
            totals.add_sinks(sinks)
        out = totals.out.to(value.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, totals.lse)
        ctx.settings = dataclasses.replace(scoring, sinks=None), runs, ring, fused
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse = ctx.saved_tensors
        scoring, runs, ring, fused = ctx.settings
        grad = grads[0].contiguous()
        incoming = Incoming(grad, out, lse, (grad.to(lse.dtype) * out).sum(-1))
        grad_query, grad_key, grad_value = (
            states.new_zeros(states.shape, dtype=lse.dtype) for states in (query, key, value)
        )
        block, travelling = [key, value], None
        for step in range(ring.size):
            arriving = ring.shift(block, 0) if step + 1 < ring.size else None
            part = runs[(ring.rank - step) % ring.size]
            summands = (grad_query, torch.zeros_like(grad_key), torch.zeros_like(grad_value))
            partial.add_part_gradients(summands, incoming, query, block[0], block[1], scoring, part, fused=fused)
            totals = [summands[1], summands[2]]
            if travelling is not None:
                totals = [total.add_(more) for total, more in zip(travelling(), totals, strict=True)]
            travelling = ring.shift(totals, 1)
            if arriving is not None:
                block = arriving()
        assert travelling is not None
        grad_key, grad_value = travelling()
        grad_sinks = None if sinks is None else partial.sink_gradients(incoming, sinks)
        return (
            grad_query.to(query.dtype),
            grad_key.to(key.dtype),
            grad_value.to(value.dtype),
            grad_sinks,
            *(None,) * 4,
        )
