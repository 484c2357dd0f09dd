"""Ulysses sequence parallelism over packed rows (Jacobs et al. 2023, arXiv:2309.14509).

The ranks of a group share the tokens of a micro-batch. Everything that treats tokens one by one works on a rank's own piece of the row;
attention, where tokens meet, gets all tokens of some of the heads:

    [own tokens, all heads] -> all-to-all -> [all tokens, own heads] -> attention -> all-to-all -> [own tokens, all heads]
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hone.errors import ModelError
from hone.generation.attention import Layout, Scoring
from hone.training.packing import PackedSequences

SIZE_KEY = "actor_rollout_ref.actor.ulysses_sequence_parallel_size"


@dataclass(frozen=True)
class SequenceParallelLayout:
    """The layout of a whole row, seen from one rank's piece of it.

    Attributes:
        whole: layout of the row.
        position_ids: ``[1, n]`` of this rank's tokens; behind the row's end 0.
        group: the ranks that share the row.
    """

    whole: Layout
    position_ids: Tensor
    group: ProcessGroup

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention: ``[1, heads, n, head_dim]`` of this rank's tokens to ``[1, n, heads, head_dim]``."""
        ranks, length = dist.get_world_size(self.group), self.whole.position_ids.shape[1]
        heads = query.shape[1]
        key, value = (_for_every_rank(states, ranks) for states in (key, value))
        queries, keys, values = (
            _exchange(states[0], 0, 1, self.group)[None, :, :length] for states in (query, key, value)
        )
        if scoring.sinks is not None:
            place = dist.get_rank(self.group)
            own = scoring.sinks.view(ranks, heads // ranks)[place]
            scoring = dataclasses.replace(scoring, sinks=own)
        mixed = self.whole.attend(layer, queries, keys, values, scoring)[0]  # [N, own heads, head_dim]
        padded = torch.nn.functional.pad(mixed, (0, 0, 0, 0, 0, query.shape[2] * ranks - length))
        return _exchange(padded, 0, 1, self.group)[None]


def own_piece(packed: PackedSequences, group: ProcessGroup) -> tuple[PackedSequences, Tensor]:
    """This rank's piece of a packed row.

    Returns:
        The piece, whose outputs are of those response tokens that are predicted in it; and which of the row's response tokens
        these are, ``[r]``.
    """
    ranks, place = dist.get_world_size(group), dist.get_rank(group)
    length = packed.input_ids.shape[1]
    size = -(-length // ranks)
    missing = size * ranks - length

    def piece(row: Tensor) -> Tensor:
        return torch.nn.functional.pad(row, (0, missing))[:, place * size : (place + 1) * size]

    index = packed.output_index - place * size
    mine = ((index >= 0) & (index < size)).nonzero()[:, 0]
    layout = SequenceParallelLayout(packed.layout, piece(packed.layout.position_ids), group)
    return PackedSequences(piece(packed.input_ids), layout, index[mine], packed.targets[mine]), mine


def of_whole_row(values: Tensor, mine: Tensor, responses: int, group: ProcessGroup) -> Tensor:
    """``[responses]`` from what each rank of the group has computed of its own piece; the gradient goes back to the piece.

    Every rank computes the same loss from the result, so the gradient of a value is the one that its rank sees.
    """
    return _Collect.apply(values, mine, responses, group)  # type: ignore[return-value]


def check_heads(heads: int, key_value_heads: int, ranks: int) -> None:
    """Raise ModelError when the heads do not divide over ``ranks``."""
    if heads % ranks or (key_value_heads % ranks and ranks % key_value_heads):
        raise ModelError(
            f"{heads} attention heads with {key_value_heads} key-value heads cannot be divided over {ranks} "
            "sequence-parallel ranks",
            why="in attention each rank works on all tokens of its own heads",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=<a divisor of {heads} that divides {key_value_heads} or is a multiple of it>",
        )


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, mine: Tensor, responses: int, group: ProcessGroup) -> Tensor:
        ctx.save_for_backward(mine)
        whole = values.new_zeros(responses)
        whole[mine] = values
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return grads[0][mine], None, None, None


def _for_every_rank(states: Tensor, ranks: int) -> Tensor:
    """Key or value heads repeated when there are fewer than ranks, so that each rank gets one."""
    heads = states.shape[1]
    return states if heads % ranks == 0 else states.repeat_interleave(ranks // heads, 1)


def _exchange(states: Tensor, scatter: int, gather: int, group: ProcessGroup) -> Tensor:
    """All-to-all: dimension ``scatter`` is cut over the ranks, dimension ``gather`` put together from them."""
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
