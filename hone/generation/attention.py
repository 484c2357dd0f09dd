"""One attention for training and generation, for every Hugging Face decoder: packed, without padding, without masks.

Transformers lets a model's attention be replaced by a registered function. The one registered here, ``"hone"``, does
nothing itself: a *layout* object travels through the model's forward pass in ``**kwargs`` and knows which tokens belong
together. :class:`PackedLayout` is whole sequences end to end (training, prefill); decoding has a layout of its own beside
its key-value cache. Because transformers does not know the name, it builds no mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from hone.errors import ModelError

NAME = "hone"


@dataclass(frozen=True)
class Scoring:
    """How scores are made from queries and keys, as the model's attention module asks.

    Attributes:
        scale: factor of ``query @ key``.
        window: a token sees itself and this many - 1 tokens before it, or None for all (sliding window).
        softcap: scores are squashed to ``softcap * tanh(score / softcap)``, or None (Gemma 2).
        sinks: ``[heads]`` extra scores that take probability and give nothing, or None (GPT-OSS).
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a fused kernel can do it."""
        return self.softcap is None and self.sinks is None


class Layout(Protocol):
    """Knows which tokens attend to which."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention output ``[batch, length, heads, head_dim]`` for ``[batch, heads, length, head_dim]`` inputs."""
        ...


def hone_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layout: Layout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered function: asks the layout."""
    scoring = Scoring(scaling, sliding_window, softcap, s_aux)
    return layout.attend(module.layer_idx, query, key, value, scoring), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, hone_attention)


def use_hone_attention(model: nn.Module) -> None:
    """Switch ``model`` (plain, PEFT-wrapped, with any head) to this attention.

    Raises:
        ModelError: the model's attention cannot be replaced.
    """
    causal = getattr(model, "get_base_model", lambda: model)()
    if not getattr(causal, "_supports_attention_backend", False):
        raise ModelError(
            f"{type(causal).__name__} does not let its attention be replaced, which Hone needs for packing",
            where="model.path",
            fix="use a decoder such as Qwen3, Llama, Mistral, Gemma or GPT-OSS",
        )
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            config._attn_implementation = NAME  # type: ignore[union-attr]


@dataclass(frozen=True)
class _Rectangle:
    """Sequences of similar length, right-padded: ``source [b * L]`` gathers them, ``kept`` are the cells that are tokens."""

    rows: int
    width: int
    source: Tensor
    kept: Tensor
    target: Tensor


@dataclass(frozen=True)
class PackedLayout:
    """``B`` sequences end to end in one row of ``N`` tokens, each causal within itself.

    Linear layers see no padding. For attention, sequences of similar length are gathered to rectangles padded on the
    right, where a causal kernel never lets a pad be seen by a token.

    Attributes:
        position_ids: ``[1, N]``, beginning at 0 in each sequence.
        rectangles: how to gather.
    """

    position_ids: Tensor
    rectangles: tuple[_Rectangle, ...]

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Lay out sequences of the given lengths (each at least 1)."""
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        rectangles = tuple(_rectangle(group, lengths, starts, device) for group in _similar(lengths))
        return cls(positions[None].to(device), rectangles)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention within each sequence: ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        del layer
        query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))  # [N, heads, head_dim]
        out: Tensor | None = None
        for rectangle in self.rectangles:
            states = (rectangle_of(states, rectangle) for states in (query, key, value))
            found = causal_attention(*states, scoring).transpose(1, 2).flatten(0, 1)  # [b * L, heads, head_dim]
            if len(self.rectangles) == 1:
                out = found if len(rectangle.kept) == len(found) else found.index_select(0, rectangle.kept)
                order = rectangle.target
                return out.index_select(0, order)[None]
            out = query.new_empty(query.shape[0], *found.shape[1:], dtype=found.dtype) if out is None else out
            out = out.index_copy(0, rectangle.target, found.index_select(0, rectangle.kept))
        assert out is not None
        return out[None]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention over ``[b, heads, L, head_dim]``; keys and values may have fewer heads."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    window = scoring.window if scoring.window is not None and scoring.window < length else None
    if scoring.plain and window is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scoring.scale)
    place = torch.arange(length, device=query.device)
    distance = place[:, None] - place
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    if scoring.plain:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=scoring.scale)
    probabilities = attention_weights(query @ key.transpose(-1, -2), ~seen, scoring)
    return probabilities.to(value.dtype) @ value


def attention_weights(scores: Tensor, hidden: Tensor, scoring: Scoring) -> Tensor:
    """Softmax of raw ``scores [b, heads, Q, K]`` (not yet scaled) after softcap, with ``hidden`` places left out and sinks."""
    scores = scores.float() * scoring.scale
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    scores = scores.masked_fill(hidden, float("-inf"))
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]


def rectangle_of(states: Tensor, rectangle: _Rectangle) -> Tensor:
    """Gather ``[N, heads, head_dim]`` to ``[b, heads, L, head_dim]``."""
    gathered = states.index_select(0, rectangle.source)
    return gathered.view(rectangle.rows, rectangle.width, *states.shape[1:]).transpose(1, 2)


def _similar(lengths: Tensor) -> list[list[int]]:
    """Rows in groups, the shortest of each at least three quarters of its longest (or the group is small)."""
    groups: list[list[int]] = []
    longest = 0
    for row in torch.sort(lengths, descending=True, stable=True).indices.tolist():
        length = int(lengths[row])
        if not groups or (length < 0.75 * longest and len(groups[-1]) * longest >= 512):
            groups.append([])
            longest = length
        groups[-1].append(row)
    return groups


def _rectangle(rows: list[int], lengths: Tensor, starts: Tensor, device: torch.device | str) -> _Rectangle:
    size, begin = lengths[rows], starts[rows]
    width = int(size.max())
    column = torch.arange(width)
    cells = begin[:, None] + torch.minimum(column, size[:, None] - 1)  # pads repeat the last token
    token = column < size[:, None]
    kept = token.flatten().nonzero()[:, 0]
    target = cells.flatten()[kept]
    if len(rows) == len(lengths):  # one rectangle: "target" undoes the order instead
        target = torch.argsort(target)
    return _Rectangle(len(rows), width, cells.flatten().to(device), kept.to(device), target.to(device))
