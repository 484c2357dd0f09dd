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
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from hone.errors import ModelError
from hone.generation.cpu_attention import blocked_causal_attention

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
        source: ``[rows * width]`` the packed token in each cell (pads repeat the last token of their own sequence), or
            None when the cells are the packed tokens ``start, start + 1, ...`` themselves.
        start: the first token.
    """

    rows: int
    width: int
    source: Tensor | None
    start: int

    def gather(self, states: Tensor) -> Tensor:
        """``[N, heads, head_dim]`` to ``[rows, heads, width, head_dim]``."""
        if self.source is None:
            cells = states[self.start : self.start + self.rows * self.width]
        else:
            cells = states.index_select(0, self.source)
        return cells.view(self.rows, self.width, *states.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class PackedLayout:
    """``B`` sequences end to end in one row of ``N`` tokens, each causal within itself.

    Linear layers see no padding. For attention, sequences of similar length are gathered to rectangles padded on the
    right, where a causal kernel never lets a pad be seen by a token.

    >>> PackedLayout.from_lengths([3, 2], "cpu").position_ids
    tensor([[0, 1, 2, 0, 1]])

    Attributes:
        position_ids: ``[1, N]``, beginning at 0 in each sequence.
        rectangles: how to gather.
        back: ``[N]`` the cell, over all rectangles, that holds each token; None when it is the same place.
    """

    position_ids: Tensor
    rectangles: tuple[_Rectangle, ...]
    back: Tensor | None

    @classmethod
    def from_lengths(cls, lengths: Tensor | Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Lay out sequences of the given lengths.

        Raises:
            ValueError: no sequence, or an empty one.
        """
        lengths = torch.as_tensor(lengths, dtype=torch.int64, device="cpu")
        if len(lengths) == 0 or int(lengths.min()) < 1:
            raise ValueError(f"every packed sequence needs at least one token; lengths are {lengths.tolist()}")
        total = int(lengths.sum())
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(total) - starts.repeat_interleave(lengths)
        return cls._build(positions, torch.arange(total), lengths, torch.zeros_like(lengths), device)

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
        common = prefixes[prefix_of]
        lengths, begins = common + suffixes, prefixes.cumsum(0) - prefixes
        offsets = lengths.cumsum(0) - lengths
        column = torch.arange(int(lengths.sum())) - offsets.repeat_interleave(lengths)
        own = int(prefixes.sum()) + suffixes.cumsum(0) - suffixes  # where each suffix begins
        inside = column < common.repeat_interleave(lengths)
        source = torch.where(
            inside,
            begins[prefix_of].repeat_interleave(lengths) + column,
            (own - common).repeat_interleave(lengths) + column,
        )
        positions = torch.empty(int(prefixes.sum() + suffixes.sum()), dtype=torch.int64)
        positions[source] = column
        first = torch.full_like(prefixes, len(suffixes)).scatter_reduce(
            0, prefix_of, torch.arange(len(suffixes)), reduce="amin"
        )
        computes_prefix = first[prefix_of] == torch.arange(len(suffixes))
        return cls._build(positions, source, lengths, torch.where(computes_prefix, 0, common), device)

    @classmethod
    def _build(
        cls, positions: Tensor, source: Tensor, lengths: Tensor, keep_from: Tensor, device: torch.device | str
    ) -> PackedLayout:
        """Gather sequences to rectangles.

        Args:
            positions: ``[N]`` of the packed tokens.
            source: the packed token of every token of every sequence, sequences end to end.
            lengths: ``[B]`` of the sequences.
            keep_from: ``[B]`` the outputs of a sequence's earlier tokens are taken from another sequence.
        """
        starts = lengths.cumsum(0) - lengths
        back = torch.empty(len(positions), dtype=torch.int64)
        rectangles, cells = [], 0
        for members in _similar(lengths.tolist()):
            size = lengths[members][:, None]
            column = torch.arange(int(size.max()))
            token = source[starts[members][:, None] + torch.minimum(column, size - 1)]
            place = cells + torch.arange(token.numel()).view_as(token)
            kept = (column < size) & (column >= keep_from[members][:, None])
            back[token[kept]] = place[kept]
            cells += token.numel()
            flat, start = token.flatten(), int(token[0, 0])
            gathered = None if _in_order(flat, start) else flat.to(device)
            rectangles.append(_Rectangle(token.shape[0], token.shape[1], gathered, start))
        ordered = cells == len(positions) and _in_order(back, 0)
        return cls(positions[None].to(device), tuple(rectangles), None if ordered else back.to(device))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention within each sequence: ``[1, heads, N, head_dim]`` to ``[1, N, heads, head_dim]``."""
        del layer
        rows = [states[0].transpose(0, 1).contiguous() for states in (query, key, value)]  # [N, heads, head_dim]
        found = []
        for rectangle in self.rectangles:
            queries, keys, values = (rectangle.gather(states) for states in rows)
            mixed = causal_attention(queries, keys, values, scoring)
            found.append(mixed.transpose(1, 2).flatten(0, 1))  # [rows * width, heads, head_dim]
        cells = found[0] if len(found) == 1 else torch.cat(found)
        return (cells if self.back is None else cells.index_select(0, self.back))[None]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
    """Causal attention over ``[b, heads, L, head_dim]``; keys and values may have fewer heads."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    window = scoring.window if scoring.window is not None and scoring.window < length else None
    seen = None
    if window is not None or not scoring.plain:
        place = torch.arange(length, device=query.device)
        distance = place[:, None] - place
        seen = (distance >= 0) & (distance < (window or length))
    if scoring.plain and seen is None and not scoring.dropout and query.device.type == "cpu":
        return blocked_causal_attention(query, key, value, scoring.scale)
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


def _in_order(places: Tensor, start: int) -> bool:
    return bool((places == torch.arange(start, start + len(places))).all())


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
