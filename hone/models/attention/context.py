"""One attention for training and generation, for every Hugging Face decoder: packed, without padding, without masks.

Transformers lets a registered function replace a model's attention (:mod:`hone.models.routing` switches a model to it). The
one registered here, ``"hone"``, computes nothing itself: a *context* object travels through the model's forward pass in ``**kwargs`` and knows which tokens see which.
:class:`hone.models.attention.packed.PackedContext` is whole sequences end to end (training, prefill); the native engine has
contexts that read and append to its KV cache. Because transformers does not know the name, it builds no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

from hone.errors import ModelError

NAME = "hone"
GIVEN = "_hone_given"
"""Attribute of a module with the context of its layer, where the layer's own code does not hand it on."""


@dataclass(frozen=True)
class Scoring:
    """The computation of attention scores from queries and keys that the model's attention module requests."""

    scale: float  # factor of ``query @ key``
    # a token sees itself and the ``window - 1`` tokens before it; None means all (sliding window)
    window: int | None = None
    softcap: float | None = None  # scores become ``softcap * tanh(score / softcap)``; None means no cap (Gemma 2)
    # ``[heads]`` extra scores that take probability and contribute no value, or None (GPT-OSS)
    sinks: Tensor | None = None
    dropout: float = 0.0  # of the attention probabilities; transformers passes 0 outside training

    @property
    def plain(self) -> bool:
        """True if a fused kernel supports it."""
        return self.softcap is None and self.sinks is None


class AttentionContext(Protocol):
    """Knows which tokens attend to which; ``position_ids [batch, length]`` are those in their sequences."""

    @property
    def position_ids(self) -> Tensor: ...

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Compute attention: ``[batch, heads, length, head_dim]`` to ``[batch, length, heads, head_dim]``."""
        ...

    def mix(self, layer: int, mixer: Callable[..., Tensor], *states: Tensor) -> Tensor:
        """Let the tokens of each sequence meet in a way that is not softmax attention, for example linear attention.

        ``mixer`` maps whole sequences ``[rows, width, ...]``, one tensor for each of ``states`` and padded on the right, to
        ``[rows, width, ...]``. It must be causal, so that padding changes nothing. ``states [batch, length, ...]`` become
        ``[batch, length, ...]``; the cache of the layer gets them in the same order.
        """
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
    context: AttentionContext | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Pass queries, keys and values to the context; the function registered with transformers.

    Raises:
        ModelError: no context came through the forward pass, or the module is not causal.
    """
    context = require_context(module, context)
    if getattr(module, "is_causal", True) is False:
        raise ModelError(
            f"{type(module).__name__} lets a token see later ones",
            why="a policy generates from left to right",
            fix="use a causal language model",
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scale, sliding_window, softcap, s_aux, dropout)
    return context.attend(module.layer_idx, query, key, value, scoring), None  # type: ignore[arg-type]


def require_context(module: nn.Module, context: AttentionContext | None) -> AttentionContext:
    """Return the context that an attention module received."""
    context = vars(module).get(GIVEN) if context is None else context
    if context is None:
        raise ModelError(
            f"{type(module).__name__} computes attention without a context",
            why="the context alone says which tokens see which; without it sequences would see each other",
            fix="call the model with context=PackedContext.from_lengths(...); an architecture that drops it on the way "
            "cannot be used",
        )
    return context


AttentionInterface.register(NAME, hone_attention)
