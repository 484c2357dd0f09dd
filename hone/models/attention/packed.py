"""Attention over whole sequences packed end to end, for training and prefill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from hone.models.attention import cpu, softmax, varlen
from hone.models.attention.context import Scoring
from hone.models.attention.cpu import CausalTiles
from hone.models.attention.tiles import PaddedTiles, Sequences
from hone.models.attention.varlen import VarlenPlan


@dataclass(frozen=True)
class SeenAhead:
    """Runs of tokens in which a token sees the later ones of its run, too: the images of some models."""

    # of each run the packed tokens, and those of its sequence from the first to the last of the run
    runs: tuple[tuple[Tensor, Tensor], ...]
    only_in_windows: bool = False  # whether this holds in layers with a window alone

    def replace_in(self, output: Tensor, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Return causal attention ``output [1, N, heads, head_dim]`` with that of the runs in its place."""
        if self.only_in_windows and scoring.window is None:
            return output
        mixed = [
            softmax.attention_to_all(query[:, :, run], key[:, :, seen], value[:, :, seen], scoring).transpose(1, 2)
            for run, seen in self.runs
        ]
        return output.index_copy(1, torch.cat([run for run, _ in self.runs]), torch.cat(mixed, 1).to(output.dtype))


@dataclass(frozen=True)
class PackedContext:
    """``B`` sequences end to end in one row of ``N`` tokens, each causal within itself.

    Linear layers see no padding. Attention on CUDA is one call for all sequences (:mod:`hone.models.attention.varlen`). On the CPU,
    sequences of similar length are gathered into padded tiles (:mod:`hone.models.attention.cpu`). What neither supports is padded
    on the right, where a causal kernel never shows padding to a token.

    >>> PackedContext.from_lengths([3, 2]).position_ids
    tensor([[0, 1, 2, 0, 1]])
    >>> PackedContext.from_lengths([3, 4], shared=[0, 2]).position_ids
    tensor([[0, 1, 2, 2, 3]])
    """

    position_ids: Tensor  # ``[1, N]``, starting at 0 in each sequence
    sequences: Sequences  # index ranges of the sequences in the row
    ahead: SeenAhead | None = None  # tokens that see later ones; None without such

    @classmethod
    def from_lengths(
        cls,
        lengths: Tensor | Sequence[int],  # ``[B]`` tokens of each sequence
        device: torch.device | str = "cpu",  # of the positions
        *,
        # ``[B]`` how many of the tokens are the first ones of the sequence before; None for none
        shared: Tensor | Sequence[int] | None = None,
    ) -> PackedContext:
        """Pack sequences, each of which may begin with tokens of the sequence before it.

        Linear layers see such a prefix once; attention places it before each suffix. In depth-first order of the tree of their
        prefixes, sequences share whatever they have in common (:mod:`hone.data.prefixes`).

        Raises:
            ValueError: there is no sequence, or one has no token of its own.
        """
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        shared = (
            torch.zeros_like(lengths) if shared is None else torch.as_tensor(shared, dtype=torch.int64, device="cpu")
        )
        sequences = Sequences.from_shared(lengths, shared)
        suffixes = sequences.suffix_length
        column = torch.arange(int(suffixes.sum())) - sequences.suffix_start.repeat_interleave(suffixes)
        positions = shared.repeat_interleave(suffixes) + column
        return cls(positions[None].to(device), sequences)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute attention within each sequence: ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        del layer
        output = self._causal(query, key, value, scoring)
        return output if self.ahead is None else self.ahead.replace_in(output, query, key, value, scoring)

    def _causal(self, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        rows = [
            states.squeeze(0).transpose(0, 1).contiguous() for states in (query, key, value)
        ]  # [N, heads, head_dim]
        if self.computes_in_blocks(query, scoring):
            return cpu.causal_attention(rows[0], rows[1], rows[2], scoring.scale, self._cpu_tiles)[None]
        if query.device.type != "cpu":
            obstacle = varlen.obstacle(query, value, scoring)
            if obstacle is None:
                return varlen.causal_attention(rows[0], rows[1], rows[2], scoring, self.varlen_plan)[None]
            varlen.report_padding(obstacle)
        outputs = []
        for tile in self.tiles.tiles:
            queries, keys, values = (tile.gather(states).transpose(1, 2) for states in rows)
            outputs.append(softmax.causal_attention(queries, keys, values, scoring).transpose(1, 2))
        return self.tiles.scatter(outputs)[None]

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Apply ``mixer`` to each sequence: ``[1, N, ...]`` to ``[1, N, ...]``."""
        del layer
        outputs = [mixer(*(tile.gather(part.squeeze(0)) for part in states)) for tile in self.tiles.tiles]
        return self.tiles.scatter(outputs)[None]

    def attend_gradients(
        self, incoming: Tensor, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> list[Tensor]:
        """Compute the gradients of queries, keys, values and, if there are any, sinks, from that of the output of :meth:`attend`.

        Nothing but the inputs is kept for them.
        """
        if self.computes_in_blocks(query, scoring) and self.ahead is None:
            rows = [states.squeeze(0).transpose(0, 1).contiguous() for states in (query, key, value)]
            scale, tiles = scoring.scale, self._cpu_tiles
            gradients = cpu.causal_attention_gradients(incoming[0], rows[0], rows[1], rows[2], scale, tiles)
            return [gradient.transpose(0, 1)[None] for gradient in gradients]
        inputs = [query, key, value] if scoring.sinks is None else [query, key, value, scoring.sinks]
        inputs = [states.detach().requires_grad_() for states in inputs]
        sinks = inputs[3] if len(inputs) > 3 else None
        with torch.enable_grad():
            output = self.attend(0, inputs[0], inputs[1], inputs[2], dataclasses.replace(scoring, sinks=sinks))
        return list(torch.autograd.grad(output, inputs, incoming))

    def computes_in_blocks(self, query: Tensor, scoring: Scoring) -> bool:
        """True if :mod:`hone.models.attention.cpu` computes this attention."""
        on_cpu = query.device.type == "cpu"
        return on_cpu and scoring.plain and not scoring.dropout and self._within(scoring.window)

    def _within(self, window: int | None) -> bool:
        """True if no sequence is longer than the attention window."""
        return window is None or int(self.sequences.lengths.max()) <= window

    @cached_property
    def _cpu_tiles(self) -> CausalTiles:
        return CausalTiles(self.sequences)

    @cached_property
    def varlen_plan(self) -> VarlenPlan:
        return VarlenPlan.from_sequences(self.sequences, self.position_ids.device)

    @cached_property
    def tiles(self) -> PaddedTiles:
        return PaddedTiles.from_sequences(self.sequences, self.position_ids.device)
