"""Ranks that share the tokens of a packed row: Ulysses sequence parallelism (Jacobs et al. 2023, arXiv:2309.14509), and rings.

Token-wise layers work on the rank's tokens. With Ulysses attention gets all tokens of some of the heads:

    [local tokens, all heads] -> all-to-all -> [all tokens, local heads] -> attention -> all-to-all -> [local tokens, all heads]

With context parallelism the row is divided over the rings' ranks first (:mod:`.ring`), and "all tokens" are those of a rank of the
ring. Its attention is :class:`~.ring.RingContext`, which needs all heads of no one: it divides tokens where heads do not divide.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.errors import ModelError
from hone.models.attention.context import AttentionContext, Scoring
from hone.models.attention.packed import PackedContext
from hone.models.experts import UNKNOWN
from hone.models.inputs import PackedSequences
from hone.training.backends.fsdp2.ring import BLOCK, NONE, ProcessRing, RingContext
from hone.training.layout import Meshes

SIZE = "ulysses_sequence_parallel_size"
SIZE_KEY = f"{BLOCK}.{SIZE}"


@dataclass(frozen=True)
class SequenceParallelContext:
    """Attention context of one rank's tokens of a row, by Ulysses."""

    whole: AttentionContext  # context of the group's tokens: the whole row, or a ring's share
    position_ids: Tensor  # ``[1, n]`` of this rank's tokens; 0 where there is none
    group: ProcessGroup

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute attention of this rank's tokens: ``[1, heads, n, head_dim]`` to ``[1, n, heads, head_dim]``."""
        ranks, length = dist.get_world_size(self.group), self.whole.position_ids.shape[1]
        heads = query.shape[1]
        key, value = (_for_every_rank(states, ranks) for states in (key, value))
        queries, keys, values = (
            _exchange(states[0], 0, 1, self.group)[None, :, :length] for states in (query, key, value)
        )
        if scoring.sinks is not None:
            rank = dist.get_rank(self.group)
            local_sinks = scoring.sinks.view(ranks, heads // ranks)[rank]
            scoring = dataclasses.replace(scoring, sinks=local_sinks)
        mixed = self.whole.attend(layer, queries, keys, values, scoring)[0]  # [N, local heads, head_dim]
        padded = torch.nn.functional.pad(mixed, (0, 0, 0, 0, 0, query.shape[2] * ranks - length))
        return _exchange(padded, 0, 1, self.group)[None]

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Raise ModelError: only softmax attention can be divided by heads."""
        raise ModelError(
            "the model has layers without softmax attention, which sequence parallelism does not support",
            why="each rank computes softmax attention over all tokens for some of the heads",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )


def local_tokens(packed: PackedSequences, meshes: Meshes) -> tuple[PackedSequences, Tensor]:
    """Return this rank's tokens of a packed row. Returns the tokens, whose outputs are for the response tokens
    predicted in them; and the indices of these among the row's outputs, ``[u]``.
    """
    context, tokens = packed.context, torch.arange(packed.input_ids.shape[1])
    if meshes.layout.context > 1:
        if not isinstance(context, PackedContext):
            raise TypeError(f"rows of {type(context).__name__} cannot be divided over a ring")
        context = RingContext.from_row(context.position_ids, context.sequences, ProcessRing(meshes.context_group))
        tokens = context.tokens
    if meshes.layout.sequence > 1:
        group, count = meshes.sequence_group, len(tokens)
        size = -(-count // meshes.layout.sequence)
        chunk = slice(dist.get_rank(group) * size, (dist.get_rank(group) + 1) * size)
        tokens = torch.nn.functional.pad(tokens, (0, size * meshes.layout.sequence - count), value=NONE)[chunk]
        positions = torch.nn.functional.pad(context.position_ids, (0, size * meshes.layout.sequence - count))[:, chunk]
        context = SequenceParallelContext(context, positions, group)
    tokens = tokens.to(packed.input_ids.device)
    missing, source = tokens == NONE, tokens.clamp(min=0)
    place = tokens.new_full((packed.input_ids.shape[1] + 1,), NONE)
    place[tokens] = torch.arange(
        len(tokens), device=tokens.device
    )  # that of no token is written at the end, which is never read
    index, target_index = place[packed.output_index], place[packed.target_index]
    indices = (index != NONE).nonzero()[:, 0]
    experts = packed.experts
    if experts is not None:
        experts = experts[source].masked_fill(missing[:, None], UNKNOWN)
    local = PackedSequences(
        packed.input_ids[:, source].masked_fill(missing, 0),
        context,
        index[indices],
        packed.targets[indices],
        target_index[indices],
        supports=packed.supports and packed.supports.select(indices),
        experts=experts,
        teacher=packed.teacher and packed.teacher.select(indices),
    )
    return local, indices


def gather_outputs(values: Tensor, indices: Tensor, count: int, group: ProcessGroup) -> Tensor:
    """Return all ``[count, ...]`` outputs of the whole row from each rank's chunk; gradients flow back to the chunks.

    Every rank computes the same loss from the result, so each rank already has the whole gradient of its values.
    """
    return _Collect.apply(values, indices, count, group)  # type: ignore[return-value]


def check_heads(heads: int, key_value_heads: int, ranks: int, key: str = SIZE_KEY) -> None:
    """Raise ModelError if the heads cannot be divided over ``ranks``; ``key`` is that of the size, for the message."""
    if heads % ranks or (key_value_heads % ranks and ranks % key_value_heads):
        raise ModelError(
            f"{heads} attention heads with {key_value_heads} key-value heads cannot be divided over {ranks} "
            "sequence-parallel ranks",
            why="in attention each rank computes all tokens of its heads",
            where=key,
            fix=f"{key}=<a divisor of {heads} that divides {key_value_heads} or is a multiple of it>, or {key}=1 "
            f"{key.replace(SIZE, 'context_parallel_size')}={ranks}, which any number of heads allows",
        )


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, indices: Tensor, count: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(indices)
        whole = values.new_zeros(count, *values.shape[1:])
        whole[indices] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (indices,) = ctx.saved_tensors
        return grads[0][indices], None, None, None


def _for_every_rank(states: Tensor, ranks: int) -> Tensor:
    """Repeat key or value heads if there are fewer than ranks, so that each rank gets one."""
    heads = states.shape[1]
    return states if heads % ranks == 0 else states.repeat_interleave(ranks // heads, 1)


def _exchange(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """Run an all-to-all that divides dimension ``scatter`` over the ranks and concatenates dimension ``gather``."""
    return _AllToAll.apply(states, scatter, gather, group)  # type: ignore[return-value]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
        ctx.settings = (scatter, gather, group)
        return _all_to_all(states, scatter, gather, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scatter, gather, group = ctx.settings
        return _all_to_all(grads[0], gather, scatter, group), None, None, None


def _all_to_all(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    sent = torch.stack(states.chunk(dist.get_world_size(group), scatter))
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), gather)
