"""The forward pass of a Llama-shaped model for training on the CPU, in few operations with their gradients written out.

There elementwise operations cost as much as they read and write, and autograd makes many of them from a norm or a rotation. So
models whose layers are of a known kind are computed here, as :mod:`hone.generation.native.forward` does for generation:

    hidden -> rms norm -> [q k v] -> (head norms) -> rotary -> attention -> o -> + hidden
           -> rms norm -> mlp -> + hidden

Every other model (adapters, sharded weights, hooks, gradient checkpointing) goes through its own module, the golden path; a test
holds the two together, gradients included.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.generation.attention import Layout, Scoring
from hone.generation.native.forward import FusedForward, attention_window


def fits(causal: nn.Module) -> bool:
    """Whether ``causal`` can be computed here: on the CPU, of a known kind, nothing in place of its parts or between them."""
    on_cpu = next(causal.parameters()).device.type == "cpu"
    checkpointing = any(getattr(module, "gradient_checkpointing", False) for module in causal.modules())
    return on_cpu and not checkpointing and FusedForward.fits(causal)


def hidden_states(causal: nn.Module, ids: Tensor, layout: Layout) -> Tensor:
    """Last hidden states ``[1, N, H]`` of packed ``ids [1, N]``, after the final norm; autocast decides the products' dtype."""
    decoder: Any = causal.get_decoder()  # type: ignore[operator]
    hidden = decoder.embed_tokens(ids)
    rotary = _rotary(*decoder.rotary_emb(hidden, layout.position_ids))
    hidden = hidden[0]
    for layer in decoder.layers:
        hidden = _layer(layer, hidden, rotary, layout)
    return _norm(decoder.norm, hidden)[None]


def compute_layers_here(causal: nn.Module) -> None:
    """Let the layers of a model of a known kind compute themselves so, each called as a module by its decoder: whatever is hooked
    to them (FSDP's gathering of their parameters, gradient checkpointing) stays in force.
    """
    for layer in causal.get_decoder().layers:  # type: ignore[operator]
        layer.forward = types.MethodType(_layer_forward, layer)


def _layer_forward(
    layer: Any, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], layout: Layout, **_: Any
) -> Tensor:
    hidden, added = _halves(layer, hidden_states[0], _rotary(*position_embeddings), layout)
    return hidden[None] + added[None]  # a tensor of its own, because FSDP hooks itself to what a layer returns


def _layer(layer: Any, hidden: Tensor, rotary: Tensor, layout: Layout) -> Tensor:
    hidden, added = _halves(layer, hidden, rotary, layout)
    return hidden + added


def _halves(layer: Any, hidden: Tensor, rotary: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """The hidden states after attention, and what the layer's MLP adds to them."""
    hidden = hidden + _attention(layer.self_attn, _norm(layer.input_layernorm, hidden), rotary, layout)
    return hidden, layer.mlp(_norm(layer.post_attention_layernorm, hidden))


def _rotary(cos: Tensor, sin: Tensor) -> Tensor:
    """Cosines and sines ``[1, N, head_dim]``, whose second half repeats the first, as numbers ``[N, 1, head_dim / 2]``."""
    half = cos.shape[-1] // 2
    return torch.complex(cos[0, :, :half].float(), sin[0, :, :half].float()).unsqueeze(1)


def _attention(module: Any, states: Tensor, rotary: Tensor, layout: Layout) -> Tensor:
    """In queries and keys what rotary turns together stands side by side, as pairs of one complex number: their products do not
    change with the order within a head."""
    projections = (module.q_proj, module.k_proj, module.v_proj)
    queries, keys, _ = (projection.out_features // module.head_dim for projection in projections)
    weight, epsilon = None, 0.0
    if hasattr(module, "q_norm"):
        norms = ((module.q_norm.weight, queries), (module.k_norm.weight, keys))
        joint_weight = torch.cat([_in_pairs(w, 1).expand(count, -1) for w, count in norms])
        weight, epsilon = joint_weight, module.q_norm.variance_epsilon
    joint = _joint(projections, states, (queries, keys, 0)).unflatten(-1, (-1, module.head_dim))
    heads: Any = _Heads.apply(joint, weight, epsilon, (queries, keys), rotary)
    query, key, value = (part.transpose(0, 1)[None] for part in heads)
    mixed = layout.attend(module.layer_idx, query, key, value, Scoring(module.scaling, attention_window(module)))
    return module.o_proj(mixed[0].flatten(1))


def _joint(modules: tuple[nn.Linear, ...], states: Tensor, heads: tuple[int, ...]) -> Tensor:
    """The outputs of several projections of ``states``, side by side, by one product.

    Args:
        heads: of each projection, those to be put in pairs; 0 leaves its outputs as they are.
    """
    weights = torch.cat([_in_pairs(module.weight, count) for module, count in zip(modules, heads, strict=True)])
    biases = [_in_pairs(m.bias, count) for m, count in zip(modules, heads, strict=True) if m.bias is not None]
    return F.linear(states, weights, torch.cat(biases) if biases else None)


def _in_pairs(rows: Tensor, heads: int) -> Tensor:
    """``rows [heads * head_dim, ...]`` with the halves of each head interleaved; 0 heads: as they are."""
    if heads == 0:
        return rows
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


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
    """Queries, keys and values ``[N, heads, d]`` out of one tensor: the ``queries, keys = heads`` that come first normed (when
    there is a ``weight [queries + keys, d]``) and turned by their positions (Su et al. 2021), pair by pair, in float32; values as
    they are.
    """

    @staticmethod
    def forward(
        ctx: Any, joint: Tensor, weight: Tensor | None, epsilon: float, heads: tuple[int, int], rotary: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, value = joint.tensor_split([sum(heads)], 1)
        states, scale = states.float(), None
        if weight is not None:
            scale = _inverse_rms(states, epsilon)
            states = (states * scale).mul_(weight)
        ctx.save_for_backward(joint, weight, scale, rotary)
        query, key = (torch.view_as_real(part * rotary).flatten(-2) for part in _pairs(states).split(heads, 1))
        return query, key, value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        joint, weight, scale, rotary = ctx.saved_tensors
        *turned, grad_value = grads
        heads, grad_weight = [part.shape[1] for part in turned], None
        grad = torch.empty(len(joint), sum(heads), joint.shape[2], device=joint.device)
        back = rotary.conj_physical()  # by the same angle
        for part, into in zip(turned, _pairs(grad).split(heads, 1), strict=True):
            torch.mul(_pairs(part.contiguous()), back, out=into)
        if weight is not None:
            grad, grad_weight = _rms_norm_gradients(grad, joint[:, : sum(heads)].float(), weight, scale)
        return torch.cat([grad.to(joint.dtype), grad_value], 1), grad_weight, None, None, None


def _inverse_rms(states: Tensor, epsilon: float) -> Tensor:
    norm = torch.linalg.vector_norm(states, dim=-1, keepdim=True)
    return norm.square_().div_(states.shape[-1]).add_(epsilon).rsqrt_()


def _rms_norm_gradients(grad: Tensor, states: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Of ``states [..., H]`` and ``weight``, whose shape ends the states' own."""
    normed = states * scale
    through = grad * normed
    grad_weight = through.flatten(0, -1 - weight.dim()).sum(0)
    along = through.mul_(weight).mean(-1, keepdim=True)
    return (grad * weight).addcmul_(normed, along, value=-1).mul_(scale), grad_weight


def _pairs(states: Tensor) -> Tensor:
    """``[N, heads, d]`` as complex numbers ``[N, heads, d / 2]``, a view."""
    return torch.view_as_complex(states.unflatten(-1, (-1, 2)))
