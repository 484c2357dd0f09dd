"""Executor of Llama-shaped models for training on CUDA, with the fused operators of :mod:`hone.models.kernels.cuda`.

    residual, delta -> add + RMS norm -> [q k v] -> QK norm + RoPE -> attention -> o -> delta
    residual, delta -> add + RMS norm -> [gate up] -> SwiGLU -> down -> delta

Between layers travel the residual stream in float32 (or the dtype of the embeddings) and the last output that is not yet added to it,
so that every addition is part of the norm that follows it. Sharded models keep their decoder, to whose layers FSDP hooks itself: there
a layer adds its last output itself. Models with adapters, hooks or another activation go through their own module; a test compares
both, gradients included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hone.models.attention.context import AttentionContext
from hone.models.dtypes import compute_dtype
from hone.models.kernels import cuda
from hone.models.kernels.cuda.gates import swiglu
from hone.models.kernels.cuda.heads import split_heads
from hone.models.kernels.cuda.matmuls import joint_linear
from hone.models.kernels.cuda.norms import add_rms_norm, rms_norm
from hone.models.llama.spec import LlamaLayer, layers_of, supports
from hone.models.llama.train import LAYER_OBSERVER

_ACTIVATIONS = ("silu", "swish")


def supports_training(causal: nn.Module) -> bool:
    """True if this executor can compute ``causal``: an unmodified Llama-shaped model with SwiGLU, on a device with the operators."""
    return cuda.available(next(causal.parameters()).device) and is_supported_model(causal)


def is_supported_model(causal: nn.Module) -> bool:
    """True for an unmodified Llama-shaped model with SwiGLU and without biases in its MLP."""
    if not supports(causal) or causal.config.hidden_act not in _ACTIVATIONS:  # type: ignore[union-attr]
        return False
    return all(linear.bias is None for layer in layers_of(causal) for linear in (*layer.gate_up, layer.down))


def hidden_states(causal: nn.Module, ids: Tensor, context: AttentionContext) -> Tensor:
    """Compute last hidden states ``[1, N, H]`` in the compute dtype, the final norm included, of packed ``ids [1, N]``."""
    decoder: Any = causal.get_decoder()  # type: ignore[operator]
    residual = decoder.embed_tokens(ids)
    rotary = _rotary(*decoder.rotary_emb(residual, context.position_ids))
    residual, delta, dtype = residual.squeeze(0), None, compute_dtype(residual)
    observe = LAYER_OBSERVER.get()
    for layer in layers_of(causal):
        residual, delta = _layer(layer, residual, delta, rotary, context, dtype)
        if observe is not None:
            observe(layer.index, residual + delta)
    assert delta is not None
    return add_rms_norm(residual, delta, decoder.norm.weight, decoder.norm.variance_epsilon, dtype)[1][None]


def layer_forward(
    module: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    context: AttentionContext,
    **_: Any,
) -> Tensor:
    """Compute a layer as its ``forward``, for :func:`~hone.models.llama.spec.replace_layer_forwards`: ``[1, N, H]`` to the same."""
    states, rotary = hidden_states.squeeze(0), _rotary(*position_embeddings)
    residual, delta = _layer(LlamaLayer(module), states, None, rotary, context, compute_dtype(states))
    return (residual + delta)[None]


def _rotary(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first half of cosines and sines ``[1, N, head_dim]``, which the second repeats, as ``[N, head_dim / 2]`` float32."""
    half = cos.shape[-1] // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()


def _layer(
    layer: LlamaLayer,
    residual: Tensor,
    delta: Tensor | None,
    rotary: tuple[Tensor, Tensor],
    context: AttentionContext,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the residual stream after attention, and the output of the MLP; under gradient checkpointing where it is enabled."""

    def compute(residual: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        module = layer.module
        norm = module.input_layernorm
        if delta is None:
            normed = rms_norm(residual, norm.weight, norm.variance_epsilon, dtype)
        else:
            residual, normed = add_rms_norm(residual, delta, norm.weight, norm.variance_epsilon, dtype)
        delta = _attention(layer, normed, rotary, context)
        norm = module.post_attention_layernorm
        residual, normed = add_rms_norm(residual, delta, norm.weight, norm.variance_epsilon, dtype)
        return residual, _project([layer.down], swiglu(_project(layer.gate_up, normed)))

    if layer.module.gradient_checkpointing and layer.module.training:
        return layer.module._gradient_checkpointing_func(compute, residual, delta)
    return compute(residual, delta)


def _attention(layer: LlamaLayer, states: Tensor, rotary: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
    queries, keys, _ = layer.heads
    attention, norms, epsilon = layer.attention, None, 0.0
    if hasattr(attention, "q_norm"):
        norms = torch.stack([attention.q_norm.weight, attention.k_norm.weight])
        epsilon = attention.q_norm.variance_epsilon
    joint = _project(layer.qkv, states).unflatten(-1, (-1, layer.head_dim))
    parts = split_heads(joint, norms, rotary, epsilon=epsilon, queries=queries, keys=keys)
    query, key, value = (part.transpose(0, 1)[None] for part in parts)
    mixed = context.attend(layer.index, query, key, value, layer.scoring)
    return _project([layer.out], mixed.squeeze(0).flatten(1).to(states.dtype))


def _project(modules: list[nn.Linear], states: Tensor) -> Tensor:
    biases = [module.bias for module in modules if module.bias is not None]
    return joint_linear(states, [module.weight for module in modules], biases)
