"""Executor of Llama-shaped models on CUDA, with the fused operators of :mod:`hone.models.kernels.cuda`: training and decode steps.

    residual, delta -> add + RMS norm -> [q k v] -> QK norm + RoPE -> attention -> o -> delta
    residual, delta -> add + RMS norm -> [gate up] -> SwiGLU -> down -> delta

Between layers travel the residual stream in float32 (or the dtype of the embeddings) and the last output that is not yet added to it,
so that every addition is part of the norm that follows it. Sharded models keep their decoder, to whose layers FSDP hooks itself: there
a layer adds its last output itself. Models with adapters, hooks or another activation go through their own module; a test compares
both, gradients included.

Engine and trainer compute a layer by the same function, so that both round alike; they differ in where the joint weights come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hone.models.attention.context import AttentionContext, Scoring
from hone.models.devices import compute_dtype
from hone.models.kernels import cuda
from hone.models.kernels.cuda.gates import swiglu
from hone.models.kernels.cuda.heads import split_heads
from hone.models.kernels.cuda.matmuls import joint_linear
from hone.models.kernels.cuda.norms import add_rms_norm, rms_norm
from hone.models.llama.decode import DecodeForward, FusedLinear
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


@dataclass(frozen=True)
class FusedLayer:
    """A layer's weights and projections, ready for the fused operators."""

    index: int  # position of the layer in the model
    heads: tuple[int, int, int]  # number of query, key and value heads
    head_dim: int  # width of each
    scoring: Scoring  # scale and window of attention
    input_norm: tuple[Tensor, float]  # weight and epsilon
    post_attention_norm: tuple[Tensor, float]  # weight and epsilon
    # weights ``[2, head_dim]`` of queries and keys and their epsilon; None without QK norm
    qk_norm: tuple[Tensor, float] | None
    qkv: Callable[[Tensor], Tensor]  # joint projection to queries, keys and values
    out: Callable[[Tensor], Tensor]  # projection of the attention output
    gate_up: Callable[[Tensor], Tensor]  # joint projection of the MLP
    down: Callable[[Tensor], Tensor]  # its projection back

    @classmethod
    def from_layer(
        cls, layer: LlamaLayer, projection: Callable[[list[nn.Linear]], Callable[[Tensor], Tensor]]
    ) -> FusedLayer:
        """Return the layer with projections that ``projection`` makes of the modules with a common input."""
        attention, qk_norm = layer.attention, None
        if hasattr(attention, "q_norm"):
            norms = torch.stack([attention.q_norm.weight, attention.k_norm.weight])
            qk_norm = norms, attention.q_norm.variance_epsilon
        before, after = layer.module.input_layernorm, layer.module.post_attention_layernorm
        return cls(
            layer.index,
            layer.heads,
            layer.head_dim,
            layer.scoring,
            (before.weight, before.variance_epsilon),
            (after.weight, after.variance_epsilon),
            qk_norm,
            projection(layer.qkv),
            projection([layer.out]),
            projection(layer.gate_up),
            projection([layer.down]),
        )

    def forward(
        self,
        residual: Tensor,  # ``[N, H]`` before ``delta`` is added
        delta: Tensor | None,  # output of the layer before; None if there is none
        rotary: tuple[Tensor, Tensor],  # cosines and sines ``[N, head_dim / 2]``
        context: AttentionContext,  # gets queries, keys and values
        dtype: torch.dtype,  # of projections
        shape: tuple[int, int],  # batch and length; N is one times the other
    ) -> tuple[Tensor, Tensor]:
        """Return the residual stream ``[N, H]`` after attention, and the output of the MLP, which is not added yet."""
        if delta is None:
            normed = rms_norm(residual, *self.input_norm, dtype)
        else:
            residual, normed = add_rms_norm(residual, delta, *self.input_norm, dtype)
        queries, keys, _ = self.heads
        norms, epsilon = self.qk_norm or (None, 0.0)
        joint = self.qkv(normed).unflatten(-1, (-1, self.head_dim))
        parts = split_heads(joint, norms, rotary, epsilon=epsilon, queries=queries, keys=keys)
        query, key, value = (part.unflatten(0, shape).transpose(1, 2) for part in parts)
        mixed = context.attend(self.index, query, key, value, self.scoring)
        delta = self.out(mixed.flatten(0, 1).flatten(1).to(normed.dtype))
        residual, normed = add_rms_norm(residual, delta, *self.post_attention_norm, dtype)
        return residual, self.down(swiglu(self.gate_up(normed)))


class FusedDecodeForward(DecodeForward):
    """Forward pass for generation by the layers of the update, from joint weights in the compute dtype.

    Logits are float32: rounded to bfloat16, log-probs of engine and trainer would differ by several hundredths.
    """

    def _fused(self) -> Any:
        layers = [
            FusedLayer.from_layer(layer, lambda modules: FusedLinear(modules, self._dtype))
            for layer in layers_of(self._causal)
        ]
        vocabulary = self._causal.get_output_embeddings().weight.detach()  # type: ignore[operator]
        return layers, self._decoder.norm, vocabulary.to(self._dtype).t()

    def hidden(self, ids: Tensor, context: AttentionContext) -> Tensor:
        return self._states(ids, context).unflatten(0, ids.shape)

    def logits(self, ids: Tensor, context: AttentionContext) -> Tensor:
        """Logits ``[batch, length, V]`` in float32."""
        states = self._states(ids, context)
        return torch.ops.hone.matmul_wide(states, self._weights[2]).unflatten(0, ids.shape)

    def _states(self, ids: Tensor, context: AttentionContext) -> Tensor:
        shape = (ids.shape[0], ids.shape[1])
        residual = self._decoder.embed_tokens(ids)
        rotary = _rotary(*self._decoder.rotary_emb(residual, context.position_ids))
        residual, delta = residual.flatten(0, 1), None
        layers, norm, _ = self._weights
        for layer in layers:
            residual, delta = layer.forward(residual, delta, rotary, context, self._dtype, shape)
        assert delta is not None
        return add_rms_norm(residual, delta, norm.weight, norm.variance_epsilon, self._dtype)[1]


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
    states, rotary = hidden_states.squeeze(0), _rotary(*position_embeddings)
    residual, delta = _layer(LlamaLayer(module), states, None, rotary, context, compute_dtype(states))
    return (residual + delta)[None]


def _rotary(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first half of cosines and sines ``[batch, length, d]``, which the second repeats, as ``[N, d / 2]`` float32."""
    half = cos.shape[-1] // 2
    return cos[..., :half].flatten(0, 1).float().contiguous(), sin[..., :half].flatten(0, 1).float().contiguous()


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
        fused = FusedLayer.from_layer(layer, _joined)
        return fused.forward(residual, delta, rotary, context, dtype, (1, len(residual)))

    if layer.module.gradient_checkpointing and layer.module.training:
        return layer.module._gradient_checkpointing_func(compute, residual, delta)
    return compute(residual, delta)


def _joined(modules: list[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """Return the joint projection of modules, whose weights are cast and joined in each call."""
    weights = [module.weight for module in modules]
    biases = [module.bias for module in modules if module.bias is not None]
    return lambda states: joint_linear(states, weights, biases)
