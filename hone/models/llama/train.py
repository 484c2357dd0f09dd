"""Executor of Llama-shaped models for training on the CPU, with the gradients of norms and rotations written out.

On the CPU an elementwise operation costs as much as the memory it reads and writes, and autograd records many of them for one
norm or rotation. So the layers are computed from their parameters. Models with adapters, sharded weights or hooks go through
their own module; a test compares both, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention.context import AttentionContext
from hone.models.llama.spec import LlamaLayer, layers_of, supports

LAYER_OBSERVER: ContextVar[Callable[[int, Tensor], None] | None] = ContextVar("LAYER_OBSERVER", default=None)
"""Receives the index and the output ``[N, H]`` of every layer; None in ordinary training."""


def supports_training(causal: nn.Module) -> bool:
    """True if this executor can compute ``causal``: an unmodified Llama-shaped model on the CPU."""
    return next(causal.parameters()).device.type == "cpu" and supports(causal)


def hidden_states(causal: nn.Module, ids: Tensor, context: AttentionContext) -> Tensor:
    """Compute last hidden states ``[1, N, H]``, the final norm included, of packed ``ids [1, N]``; autocast decides the dtype."""
    decoder: Any = causal.get_decoder()  # type: ignore[operator]
    hidden = decoder.embed_tokens(ids)
    rotary = _rotary(*decoder.rotary_emb(hidden, context.position_ids))
    hidden = hidden.squeeze(0)  # not [0], whose gradient would be a copy
    observe = LAYER_OBSERVER.get()
    for layer in layers_of(causal):
        hidden = _layer(layer, hidden, rotary, context)
        if observe is not None:
            observe(layer.index, hidden)
    return _norm(decoder.norm, hidden)[None]


def layer_forward(
    module: Any,
    hidden_states: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    context: AttentionContext,
    **_: Any,
) -> Tensor:
    layer, rotary = LlamaLayer(module), _rotary(*position_embeddings)

    def compute(states: Tensor) -> Tensor:
        hidden, added = _halves(layer, states.squeeze(0), rotary, context)
        return hidden[None] + added[None]  # a new tensor, because FSDP hooks itself to the tensor that a layer returns

    return _checkpointed(layer, compute, hidden_states)


def _layer(layer: LlamaLayer, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
    def compute(states: Tensor) -> Tensor:
        hidden, added = _halves(layer, states, rotary, context)
        return hidden + added

    return _checkpointed(layer, compute, hidden)


def _checkpointed(layer: LlamaLayer, compute: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Run ``compute(states)``, under gradient checkpointing where the layer has it enabled.

    A layer of transformers applies checkpointing in its own ``forward``, which is not called here.
    """
    module = layer.module
    if module.gradient_checkpointing and module.training:
        return module._gradient_checkpointing_func(compute, states)
    return compute(states)


def _halves(
    layer: LlamaLayer, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: AttentionContext
) -> tuple[Tensor, Tensor]:
    """Return the hidden states after attention, and the output of the MLP that is added to them."""
    module = layer.module
    hidden = hidden + _attention(layer, _norm(module.input_layernorm, hidden), rotary, context)
    return hidden, module.mlp(_norm(module.post_attention_layernorm, hidden))


def _rotary(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Reshape cosines and sines ``[1, N, head_dim]`` to ``[N, 1, head_dim]``, the first half of the sines negated."""
    cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def _attention(layer: LlamaLayer, states: Tensor, rotary: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
    queries, keys, _ = layer.heads
    weight, epsilon = layer.qk_norm() or (None, 0.0)
    joint = _joint(layer.qkv, states).unflatten(-1, (-1, layer.head_dim))
    parts = _Heads.apply(joint, weight, epsilon, (queries, keys), *rotary)
    query, key, value = (part.transpose(0, 1)[None] for part in parts)  # type: ignore[union-attr]
    mixed = context.attend(layer.index, query, key, value, layer.scoring)
    return layer.out(mixed.squeeze(0).flatten(1))


def _joint(modules: list[nn.Linear], states: Tensor) -> Tensor:
    """Concatenated outputs of several projections of ``states``, by one matmul."""
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    weights: list[Tensor] = [module.weight for module in modules]
    return F.linear(states, torch.cat(weights), torch.cat(biases) if biases else None)


def _norm(module: Any, states: Tensor) -> Tensor:
    return _RMSNorm.apply(states, module.weight, module.variance_epsilon)  # type: ignore[return-value]


class _RMSNorm(torch.autograd.Function):
    """``weight * x / sqrt(mean(x**2) + epsilon)`` over the last dimension (Zhang and Sennrich 2019)."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = _inverse_rms(states, epsilon)
        ctx.save_for_backward(states, weight, scale)
        return (states * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_states, grad_weight = _rms_norm_gradients(grads[0], *ctx.saved_tensors)
        return grad_states, grad_weight, None


class _Heads(torch.autograd.Function):
    """Split ``[N, heads, d]`` into queries, keys and values; apply QK norm and RoPE to queries and keys in float32.

    Without QK norm ``weight`` is None, else ``[queries + keys, d]``. RoPE rotates the two halves of a head (Su et al. 2021).
    """

    @staticmethod
    def forward(
        ctx: Any,
        joint: Tensor,
        weight: Tensor | None,
        epsilon: float,
        counts: tuple[int, int],
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rotated = sum(counts)
        turned, scale = joint[:, :rotated].float(), None
        if weight is not None:
            scale = _inverse_rms(turned, epsilon)
            turned = (turned * scale).mul_(weight)
        ctx.save_for_backward(joint, weight, scale, cos, sin)
        query, key = (_rotate(part, cos, sin, part.new_empty(part.shape)) for part in turned.split(counts, 1))
        return query, key, joint[:, rotated:].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        joint, weight, scale, cos, sin = ctx.saved_tensors
        query, key, value = grads
        queries, rotated = query.shape[1], query.shape[1] + key.shape[1]
        grad, grad_weight = query.new_empty(len(joint), rotated, joint.shape[2]), None
        for part, into in ((query, grad[:, :queries]), (key, grad[:, queries:])):
            _rotate(part, cos, -sin, into)  # back by the same angle
        if weight is not None:
            grad, grad_weight = _rms_norm_gradients(grad, joint[:, :rotated].float(), weight, scale)
        grad_joint = torch.empty_like(joint)
        grad_joint[:, :rotated], grad_joint[:, rotated:] = grad, value
        return grad_joint, grad_weight, None, None, None, None


def _inverse_rms(states: Tensor, epsilon: float) -> Tensor:
    norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()


def _rms_norm_gradients(grad: Tensor, states: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``states [..., H]`` and ``weight``, whose shape is a suffix of that of the states."""
    grad = grad * scale
    through = grad * states
    grad_weight = through.flatten(0, -1 - weight.dim()).sum(0)
    along = through.mul_(weight).mean(-1, keepdim=True).mul_(scale.square())
    return grad.mul_(weight).addcmul_(states, along, value=-1), grad_weight


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, into: Tensor) -> Tensor:
    """Rotate the two halves of each head; the first half of ``sin`` is negated."""
    return torch.mul(states, cos, out=into).addcmul_(states.roll(states.shape[-1] // 2, -1), sin)
