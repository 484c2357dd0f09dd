"""Ring attention over packed rows (Liu et al. 2023, arXiv:2310.01889): context parallelism that no number of heads limits.

Each rank of a ring has some tokens of the packed row (:mod:`.ring_division`), in attention too. Keys and values travel: in every step a rank
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
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.errors import ModelError
from hone.models.attention import partial, varlen
from hone.models.attention.context import Scoring
from hone.models.attention.partial import Incoming, Totals
from hone.models.attention.tiles import Sequences
from hone.models.devices import compute_dtype
from hone.training.backends.fsdp2.ring_division import NONE, RingPlan, divide_row

BLOCK = "actor_rollout_ref.actor"
SIZE_KEY = f"{BLOCK}.context_parallel_size"


class Ring(Protocol):
    """Ranks in a circle.

    Attributes:
        rank: this rank.
        size: number of ranks.
    """

    rank: int
    size: int

    def shift(self, tensors: Sequence[Tensor], channel: int) -> Callable[[], list[Tensor]]:
        """Start to send tensors to the next rank; return a function that waits for those of the rank before, of the same shapes.

        Args:
            tensors: to send; they may not change before the function has returned.
            channel: number of the stream of messages; in each, messages keep their order.
        """
        ...


class ProcessRing:
    """The ring of a process group.

    Args:
        group: the ranks, in order.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.rank, self.size, self._group = dist.get_rank(group), dist.get_world_size(group), group
        self._next, self._before = (
            dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, self.size - 1)
        )

    def shift(self, tensors: Sequence[Tensor], channel: int) -> Callable[[], list[Tensor]]:
        """See :meth:`Ring.shift`."""
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
    """Attention context of one rank's tokens of a row.

    Attributes:
        position_ids: ``[1, n]`` of this rank's tokens; 0 where it has fewer.
        tokens: ``[n]`` index of each in the row, on the CPU; see :func:`~.ring_division.divide_row`.
        longest: tokens of the longest sequence of the row.
        plan: which tokens meet which.
        ring: the ranks that share the row.
    """

    position_ids: Tensor
    tokens: Tensor
    longest: int
    plan: RingPlan
    ring: Ring

    @classmethod
    def from_row(cls, position_ids: Tensor, sequences: Sequences, ring: Ring) -> RingContext:
        """Divide a row.

        Args:
            position_ids: ``[1, N]`` of the whole row.
            sequences: of the row.
            ring: the ranks.
        """
        tokens = divide_row(sequences, ring.size)
        mine, device = tokens[ring.rank], position_ids.device
        positions = position_ids[:, mine.clamp(min=0).to(device)].masked_fill((mine == NONE).to(device), 0)
        plan = RingPlan(sequences, tokens, ring.rank, device)
        return cls(positions, mine, int(sequences.lengths.max()), plan, ring)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute attention of this rank's tokens: ``[1, heads, n, head_dim]`` to ``[1, n, heads, head_dim]``. Collective.

        Raises:
            ModelError: the model has attention dropout.
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
        """Raise an error: only softmax attention adds up from parts.

        Raises:
            ModelError: always.
        """
        raise ModelError(
            "the model has layers without softmax attention, which context parallelism does not support",
            why="partial results of softmax attention add up; those of other layers do not",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )


def check_dropout(dropout: float, model_key: str = "actor_rollout_ref.model", key: str = SIZE_KEY) -> None:
    """Raise ModelError if a model has dropout of attention probabilities.

    Args:
        dropout: its probability.
        model_key: the block of the model, for the message.
        key: of the size, for the message.
    """
    if dropout:
        raise ModelError(
            f"the model has attention_dropout={dropout}, which ring attention does not support",
            why="each rank computes a part of a query's attention, and their draws would differ from those of one process",
            where=key,
            fix=f"{model_key}.override_config.attention_dropout=0, or {key}=1",
        )


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, scoring: Scoring, plan: RingPlan, ring: Ring, *, fused: bool
) -> Tensor:
    """Compute attention of this rank's queries to the keys of all ranks. Collective, in the backward pass too.

    Args:
        query: ``[n, heads, d]``.
        key: ``[n, kv_heads, d]``; query head ``i`` uses key head ``i // (heads / kv_heads)``.
        value: ``[n, kv_heads, d_v]``.
        scoring: of the model's attention, without dropout.
        plan: of the row.
        ring: the ranks.
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
