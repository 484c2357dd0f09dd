"""One attention for training and generation, for every Hugging Face decoder: packed, without padding, without masks.

Transformers lets a model's attention be replaced by a registered function. The one registered here, ``"hone"``, does
nothing itself: a *layout* object travels through the model's forward pass in ``**kwargs`` and knows which tokens belong
together. :class:`PackedLayout` is whole sequences end to end (training, prefill); decoding has a layout of its own beside
its key-value cache. Because transformers does not know the name, it builds no mask.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from hone.errors import ModelError
from hone.generation.cpu_attention import CausalPlan, Sequences

NAME = "hone"
_CAUSAL_LAYERS = {"full_attention", "sliding_attention"}
_LEAST_FULL = 0.85


@dataclass(frozen=True)
class Scoring:
    """How scores are made from queries and keys, as the model's attention module asks.

    Attributes:
        scale: factor of ``query @ key``.
        window: a token sees itself and this many - 1 tokens before it, or None for all (sliding window).
        softcap: scores are squashed to ``softcap * tanh(score / softcap)``, or None (Gemma 2).
        sinks: ``[heads]`` extra scores that take probability and give nothing, or None (GPT-OSS).
        dropout: of the attention probabilities; transformers gives 0 outside training.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether a fused kernel can do it."""
        return self.softcap is None and self.sinks is None


class Layout(Protocol):
    """Knows which tokens attend to which.

    Attributes:
        position_ids: ``[batch, length]``, place of each token in its sequence.
    """

    @property
    def position_ids(self) -> Tensor: ...

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
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: Layout | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered function: asks the layout.

    Raises:
        ModelError: no layout came through the forward pass, or the module is not causal.
    """
    if layout is None:
        raise ModelError(
            f"{type(module).__name__} computes attention without a layout",
            why="the layout alone says which tokens see which; without it sequences would see each other",
            fix="call the model with layout=PackedLayout.from_lengths(...); an architecture that drops it on the way "
            "cannot be used",
        )
    if getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"{type(module).__name__} lets a token see later ones",
            why="a policy generates from left to right",
            fix="use a causal language model",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap, s_aux, dropout)
    return layout.attend(module.layer_idx, query, key, value, scoring), None  # type: ignore[arg-type]


AttentionInterface.register(NAME, hone_attention)


def use_hone_attention(model: nn.Module) -> None:
    """Switch ``model`` (plain, PEFT-wrapped, with any head) to this attention.

    Raises:
        ModelError: the model's attention cannot be replaced, or its tokens meet elsewhere than in attention.
    """
    for module in model.modules():
        problem = _obstacle(module) if isinstance(module, PreTrainedModel) else ""
        if problem:
            raise ModelError(
                f"{type(module).__name__} cannot be trained or sampled from: {problem}",
                why="sequences are packed end to end; only attention through transformers' ALL_ATTENTION_FUNCTIONS "
                "keeps them apart",
                where="model.path",
                fix="use a decoder such as Qwen3, Llama, Mistral, Gemma or GPT-OSS",
            )
    for config in _configs(model):
        config._attn_implementation = NAME


@contextlib.contextmanager
def attention_of(model: nn.Module, name: str) -> Iterator[None]:
    """Within the block ``model`` uses another attention, for example transformers' own ``"eager"``."""
    before = [(config, config._attn_implementation) for config in _configs(model)]
    for config, _ in before:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, own in before:
            config._attn_implementation = own


@dataclass(frozen=True)
class _Rectangle:
    """Sequences of similar length, right-padded.

    Attributes:
        rows: how many.
        width: of the longest.
        source: ``[rows * width]`` the packed token in each cell (pads repeat the last token of their own sequence).
    """

    rows: int
    width: int
    source: Tensor

    def gather(self, states: Tensor) -> Tensor:
        """``[N, heads, head_dim]`` to ``[rows, heads, width, head_dim]``."""
        cells = states.index_select(0, self.source)
        return cells.view(self.rows, self.width, *states.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class PackedLayout:
    """``B`` sequences end to end in one row of ``N`` tokens, each causal within itself.

    Linear layers see no padding. For attention, sequences of similar length are gathered to rectangles: on the CPU as
    :mod:`hone.generation.cpu_attention` has it, else padded on the right, where a causal kernel never lets a pad be seen by
    a token.

    >>> PackedLayout.from_lengths([3, 2], "cpu").position_ids
    tensor([[0, 1, 2, 0, 1]])

    Attributes:
        position_ids: ``[1, N]``, beginning at 0 in each sequence.
        sequences: where each of them is.
    """

    position_ids: Tensor
    sequences: Sequences

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Lay out sequences of the given lengths.

        Raises:
            ValueError: no sequence, or an empty one.
        """
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        if len(lengths) == 0 or int(lengths.min()) < 1:
            raise ValueError(f"every packed sequence needs at least one token; lengths are {lengths.tolist()}")
        starts, none = lengths.cumsum(0) - lengths, torch.zeros_like(lengths)
        return cls._of(Sequences(none, none, starts, lengths), device)

    @classmethod
    def with_shared_prefixes(
        cls, prefixes: Tensor, suffixes: Tensor, prefix_of: Tensor, device: torch.device | str = "cpu"
    ) -> PackedLayout:
        """Lay out sequences that begin alike, each common beginning once: all prefixes end to end, then all suffixes.

        Linear layers see a prefix once; in attention it stands before each of its suffixes. The samples of a prompt
        group share their prompt this way.

        Args:
            prefixes: ``[G]`` tokens of each prefix, at least 1.
            suffixes: ``[B]`` tokens of each suffix, at least 1.
            prefix_of: ``[B]`` which prefix each suffix follows; every prefix has a suffix.
        """
        begins, none = prefixes.cumsum(0) - prefixes, torch.zeros_like(prefixes)
        own = int(prefixes.sum()) + suffixes.cumsum(0) - suffixes  # where each suffix begins
        alone, following = (none, none, begins, prefixes), (begins[prefix_of], prefixes[prefix_of], own, suffixes)
        return cls._of(Sequences(*map(torch.cat, zip(alone, following, strict=True))), device)

    @classmethod
    def _of(cls, sequences: Sequences, device: torch.device | str) -> PackedLayout:
        """Own tokens of the sequences follow one another in the row, in their order."""
        column = torch.arange(int(sequences.own.sum())) - sequences.start.repeat_interleave(sequences.own)
        positions = sequences.shared.repeat_interleave(sequences.own) + column
        return cls(positions[None].to(device), sequences)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention within each sequence: ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        del layer
        rows = [
            states.squeeze(0).transpose(0, 1).contiguous() for states in (query, key, value)
        ]  # [N, heads, head_dim]
        if query.device.type == "cpu" and scoring.plain and not scoring.dropout and self._within(scoring.window):
            return self._pieces.attend(rows[0], rows[1], rows[2], scoring.scale)[None]
        rectangles, back = self.rectangles
        found = []
        for rectangle in rectangles:
            queries, keys, values = (rectangle.gather(states) for states in rows)
            mixed = causal_attention(queries, keys, values, scoring)
            found.append(mixed.transpose(1, 2).flatten(0, 1))  # [rows * width, heads, head_dim]
        return torch.cat(found).index_select(0, back)[None]

    def _within(self, window: int | None) -> bool:
        """Whether a window of this size hides nothing."""
        return window is None or int((self.sequences.shared + self.sequences.own).max()) <= window

    @cached_property
    def _pieces(self) -> CausalPlan:
        return CausalPlan(self.sequences)

    @cached_property
    def rectangles(self) -> tuple[list[_Rectangle], Tensor]:
        """Whole sequences of similar length, right-padded; and the cell, over all rectangles, that holds each token."""
        prefix, shared, start, own = self.sequences
        device, lengths = self.position_ids.device, shared + own
        back = torch.empty(self.position_ids.shape[1], dtype=torch.int64)
        rectangles, cells = [], 0
        for members in _similar(lengths.tolist()):
            column = torch.arange(int(lengths[members].max()))
            place = torch.minimum(column, lengths[members][:, None] - 1)
            common = shared[members][:, None]
            token = torch.where(
                place < common, prefix[members][:, None] + place, start[members][:, None] + place - common
            )
            kept = (column >= common) & (column < lengths[members][:, None])
            back[token[kept]] = cells + torch.arange(token.numel()).view_as(token)[kept]
            cells += token.numel()
            rectangles.append(_Rectangle(token.shape[0], token.shape[1], token.flatten().to(device)))
        return rectangles, back.to(device)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention over ``[b, heads, L, head_dim]``; keys and values may have fewer heads."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    window = scoring.window if scoring.window is not None and scoring.window < length else None
    seen = None
    if window is not None or not scoring.plain:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or length))
    if scoring.plain:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=seen,
            is_causal=seen is None,
            dropout_p=scoring.dropout,
            scale=scoring.scale,
            enable_gqa=groups > 1,
        )
    assert seen is not None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    probabilities = attention_weights(query @ key.transpose(-1, -2), ~seen, scoring).to(value.dtype)
    return F.dropout(probabilities, scoring.dropout) @ value


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


def _similar(lengths: list[int]) -> list[list[int]]:
    """Rows in groups of neighbours in length, as few as keep every rectangle at least 85 % full."""
    groups: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        fits = groups and tokens + lengths[row] >= _LEAST_FULL * lengths[groups[-1][0]] * (len(groups[-1]) + 1)
        if not fits:
            groups.append([])
            tokens = 0
        groups[-1].append(row)
        tokens += lengths[row]
    return groups


def _obstacle(model: PreTrainedModel) -> str:
    """What in the model no layout can control, or nothing."""
    config = model.config
    if not any("attention" in type(module).__name__.lower() for module in model.modules()):
        return "it has no attention layers"
    if not type(model)._can_set_attn_implementation():
        return "its attention does not go through transformers' ALL_ATTENTION_FUNCTIONS"
    if getattr(config, "is_encoder_decoder", False):
        return "it has an encoder beside its decoder"
    if getattr(config, "use_bidirectional_attention", False) in (True, "all"):
        return "its config sets use_bidirectional_attention"
    other = sorted({*(getattr(config, "layer_types", None) or ())} - _CAUSAL_LAYERS)
    if other or type(model)._is_stateful:
        return f"it has layers of kind {', '.join(other) or 'recurrent'}"
    return ""


def _configs(model: nn.Module) -> list[PretrainedConfig]:
    """Every config that a module of the model holds, sub-configs included, each once."""
    found: dict[int, PretrainedConfig] = {}
    waiting: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while waiting:
        config = waiting.pop()
        if isinstance(config, PretrainedConfig) and id(config) not in found:
            found[id(config)] = config
            waiting.extend(getattr(config, name, None) for name in config.sub_configs)
    return list(found.values())
