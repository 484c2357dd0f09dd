"""The forward pass of a Llama-shaped model for training on the CPU, in few operations with their gradients written out.

There elementwise operations cost as much as they read and write, and autograd makes many of them from a norm or a rotation. So
models whose layers are of a known kind are computed here, as :mod:`hone.generation.native.forward` does for generation:

    hidden -> rms norm -> [q k v] -> (head norms) -> rotary -> attention -> o -> + hidden
           -> rms norm -> mlp -> + hidden

Every other model (adapters, sharded weights, hooks) goes through its own module, the golden path; a test holds the two together,
gradients included.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.generation.attention import Layout, Scoring
from hone.generation.native.forward import FusedForward, attention_window


def fits(causal: nn.Module) -> bool:
    """Whether ``causal`` can be computed here: on the CPU, of a known kind, nothing in place of its parts or between them."""
    return next(causal.parameters()).device.type == "cpu" and FusedForward.fits(causal)


def hidden_states(causal: nn.Module, ids: Tensor, layout: Layout) -> Tensor:
    """Last hidden states ``[1, N, H]`` of packed ``ids [1, N]``, after the final norm; autocast decides the products' dtype."""
    decoder: Any = causal.get_decoder()  # type: ignore[operator]
    hidden = decoder.embed_tokens(ids)
    rotary = _rotary(*decoder.rotary_emb(hidden, layout.position_ids))
    hidden = hidden.squeeze(0)  # not [0], whose gradient would be a copy
    for layer in decoder.layers:
        hidden = _layer(layer, hidden, rotary, layout)
    return _norm(decoder.norm, hidden)[None]


def compute_layers_here(causal: nn.Module) -> None:
    """Let the layers of a model of a known kind compute themselves so, each called as a module by its decoder: whatever is hooked
    to them (FSDP's gathering of their parameters) stays in force.
    """
    for layer in causal.get_decoder().layers:  # type: ignore[operator]
        layer.forward = types.MethodType(_layer_forward, layer)


def _layer_forward(
    layer: Any, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], layout: Layout, **_: Any
) -> Tensor:
    rotary = _rotary(*position_embeddings)

    def compute(states: Tensor) -> Tensor:
        hidden, added = _halves(layer, states.squeeze(0), rotary, layout)
        return hidden[None] + added[None]  # a tensor of its own, because FSDP hooks itself to what a layer returns

    return _perhaps_twice(layer, compute, hidden_states)


def _layer(layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    def compute(states: Tensor) -> Tensor:
        hidden, added = _halves(layer, states, rotary, layout)
        return hidden + added

    return _perhaps_twice(layer, compute, hidden)


def _perhaps_twice(layer: Any, compute: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """``compute(states)``; with gradient checkpointing it keeps nothing but ``states``, and the backward pass computes it again.

    A layer of transformers does so in its own ``forward``, which is not called here.
    """
    if layer.gradient_checkpointing and layer.training:
        return layer._gradient_checkpointing_func(compute, states)
    return compute(states)


def _halves(layer: Any, hidden: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout) -> tuple[Tensor, Tensor]:
    """The hidden states after attention, and what the layer's MLP adds to them."""
    hidden = hidden + _attention(layer.self_attn, _norm(layer.input_layernorm, hidden), rotary, layout)
    return hidden, layer.mlp(_norm(layer.post_attention_layernorm, hidden))


def _rotary(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines ``[1, N, head_dim]`` as ``[N, 1, head_dim]``, the sines' first half negative."""
    cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], -1)


def _attention(module: Any, states: Tensor, rotary: tuple[Tensor, Tensor], layout: Layout) -> Tensor:
    projections = (module.q_proj, module.k_proj, module.v_proj)
    queries, keys, _ = (projection.out_features // module.head_dim for projection in projections)
    weight, epsilon = None, 0.0
    if hasattr(module, "q_norm"):
        norms = ((module.q_norm.weight, queries), (module.k_norm.weight, keys))
        weight, epsilon = torch.cat([w.expand(count, -1) for w, count in norms]), module.q_norm.variance_epsilon
    joint = _joint(projections, states).unflatten(-1, (-1, module.head_dim))
    parts = _Heads.apply(joint, weight, epsilon, (queries, keys), *rotary)
    query, key, value = (part.transpose(0, 1)[None] for part in parts)  # type: ignore[union-attr]
    mixed = layout.attend(module.layer_idx, query, key, value, Scoring(module.scaling, attention_window(module)))
    return module.o_proj(mixed.squeeze(0).flatten(1))


def _joint(modules: tuple[nn.Linear, ...], states: Tensor) -> Tensor:
    """The outputs of several projections of ``states``, side by side, by one product."""
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
    """From queries, keys and values of all heads ``[N, heads, d]`` to queries and keys, so many of each, normed (when there is a
    ``weight [queries + keys, d]``) and turned by their positions (Su et al. 2021, in halves), in float32; and values as they are.
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
    """Of ``states [..., H]`` and ``weight``, whose shape ends the states' own."""
    grad = grad * scale
    through = grad * states
    grad_weight = through.flatten(0, -1 - weight.dim()).sum(0)
    along = through.mul_(weight).mean(-1, keepdim=True).mul_(scale.square())
    return grad.mul_(weight).addcmul_(states, along, value=-1), grad_weight


def _rotate(states: Tensor, cos: Tensor, sin: Tensor, into: Tensor) -> Tensor:
    """Each half of a head turned with the other; ``sin`` has its first half negative."""
    return torch.mul(states, cos, out=into).addcmul_(states.roll(states.shape[-1] // 2, -1), sin)
