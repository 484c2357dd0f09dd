"""The description of a Llama-shaped layer that both executors read: projections, norms, heads, attention window."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.mistral.modeling_mistral import MistralAttention

from hone.models.attention.context import Scoring
from hone.models.registry import family_of


@dataclass(frozen=True)
class LlamaLayer:
    """A decoder layer of a Hugging Face model, seen as a Llama-shaped layer."""

    module: Any

    @property
    def attention(self) -> Any:
        return self.module.self_attn

    @property
    def qkv(self) -> list[nn.Linear]:
        """Projections to queries, keys and values."""
        return [self.attention.q_proj, self.attention.k_proj, self.attention.v_proj]

    @property
    def out(self) -> nn.Linear:
        return self.attention.o_proj

    @property
    def gate_up(self) -> list[nn.Linear]:
        """The MLP's projections to its inner width."""
        return [self.module.mlp.gate_proj, self.module.mlp.up_proj]

    @property
    def down(self) -> nn.Linear:
        """The MLP's projection back."""
        return self.module.mlp.down_proj

    @property
    def linears(self) -> list[nn.Linear]:
        return [*self.qkv, self.out, *self.gate_up, self.down]

    @property
    def head_dim(self) -> int:
        return self.attention.head_dim

    @property
    def heads(self) -> tuple[int, int, int]:
        """Number of query, key and value heads."""
        queries, keys, values = (projection.out_features // self.head_dim for projection in self.qkv)
        return queries, keys, values

    @property
    def scoring(self) -> Scoring:
        """Scale and sliding window of the attention scores."""
        return Scoring(self.attention.scaling, self._window())

    @property
    def index(self) -> int:
        return self.attention.layer_idx

    def qk_norm(self) -> tuple[Tensor, float] | None:
        """QK-norm weights ``[query heads + key heads, head_dim]`` with their epsilon, or None without QK norm."""
        if not hasattr(self.attention, "q_norm"):
            return None
        queries, keys, _ = self.heads
        norms = ((self.attention.q_norm.weight, queries), (self.attention.k_norm.weight, keys))
        return torch.cat([weight.expand(count, -1) for weight, count in norms]), self.attention.q_norm.variance_epsilon

    def _window(self) -> int | None:
        """Qwen's attention holds its window, Mistral's reads it from the config, Llama's has none."""
        if type(self.attention) is MistralAttention:
            return self.attention.config.sliding_window
        return getattr(self.attention, "sliding_window", None)


def layers_of(causal: nn.Module) -> list[LlamaLayer]:
    return [LlamaLayer(module) for module in causal.get_decoder().layers]  # type: ignore[operator]


def replace_layer_forwards(causal: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Replace ``forward`` of every layer of a supported model by an executor's, a function with the module as first argument.

    The decoder still calls each layer as a module, so hooks on layers (FSDP gathers parameters in one) stay in force.
    """
    for layer in layers_of(causal):
        layer.module.forward = types.MethodType(forward, layer.module)


def supports(causal: nn.Module) -> bool:
    """True if ``causal`` is Llama-shaped and unmodified: no adapter replaces a part, no hook runs between parts, nothing is dropped."""
    if not _is_llama_shaped(causal) or causal.config.attention_dropout:  # type: ignore[union-attr]
        return False
    linears = [causal.get_output_embeddings()]  # type: ignore[operator]
    for layer in layers_of(causal):
        linears += layer.linears
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in causal.modules())
    return not hooked and all(type(module) is nn.Linear for module in linears)


def _is_llama_shaped(causal: nn.Module) -> bool:
    """True if the family says so and the class is the one that transformers has for it, not a subclass or another head."""
    config: Any = getattr(causal, "config", None)
    if not family_of(getattr(config, "model_type", "")).llama_shaped:
        return False
    return type(causal) is AutoModelForCausalLM._model_mapping.get(type(config), None)
