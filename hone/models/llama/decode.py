"""Executor of Llama-shaped models for generation: projections that share an input are one matmul.

A decode step runs a few rows through many small operations, and its time is mostly their number. So the model is computed from
its parameters with as few operations as possible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hone.models.attention.context import AttentionContext, Scoring
from hone.models.kernels.cpu.matmul import onednn_packs
from hone.models.llama.spec import LlamaLayer, layers_of


class FusedLinear:
    """One matmul for projections that share their input, with weights in the layout of the matmul library.

    On the CPU weights are packed for oneDNN once. Packing them in every step would cost more than the matmul itself while few
    rows are decoded.

    ``order`` is a permutation of the concatenated outputs, or None.
    """

    def __init__(self, modules: list[nn.Linear], dtype: torch.dtype, order: Tensor | None = None) -> None:
        weights = [module.weight.detach() for module in modules]
        biases = [module.bias.detach() for module in modules if module.bias is not None]
        weight = (weights[0] if len(weights) == 1 else torch.cat(weights)).to(dtype)
        bias = torch.cat(biases).to(dtype) if biases else None
        if order is not None:
            weight, bias = weight[order], None if bias is None else bias[order]
        self._dtype, self._bias = dtype, bias
        self._packed = weight.device.type == "cpu" and onednn_packs(dtype)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight

    def __call__(self, states: Tensor) -> Tensor:
        states = states.to(self._dtype)
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise.default(states, self._weight, self._bias, "none", [], "")
        return F.linear(states, self._weight, self._bias)


class _RMSNorm:
    """RMS norm (Zhang and Sennrich 2019) in few operations; torch's own takes ten times as long for a long prompt on the CPU."""

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight, self._epsilon = weight, torch.tensor(epsilon, device=weight.device)

    @classmethod
    def from_module(cls, module: Any) -> _RMSNorm:
        return cls(module.weight.detach(), module.variance_epsilon)

    def __call__(self, states: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(states, 2, -1, True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / states.shape[-1]).rsqrt_()
        return (states * scale).mul_(self._weight)


@dataclass(frozen=True)
class _DecodeLayer:
    """A layer's weights, fused and in the compute dtype."""

    input_norm: _RMSNorm
    qkv: FusedLinear
    heads: tuple[int, int, int]  # number of query, key and value heads, in the order of the ``qkv`` output
    head_dim: int  # width of each
    # norm of all query and key heads at once, or None. Query and key channels are permuted so that each RoPE pair is
    # adjacent.
    qk_norm: _RMSNorm | None
    scoring: Scoring
    out: FusedLinear
    post_attention_norm: _RMSNorm
    gate_up: FusedLinear
    activation: Any
    down: FusedLinear

    @classmethod
    def from_spec(cls, spec: LlamaLayer, dtype: torch.dtype) -> _DecodeLayer:
        pairs = torch.arange(spec.head_dim).unflatten(0, (2, -1)).t().flatten()
        norm = spec.qk_norm()
        order = torch.arange(sum(spec.heads) * spec.head_dim).unflatten(0, (-1, spec.head_dim)).clone()
        rotated = spec.heads[0] + spec.heads[1]
        order[:rotated] = order[:rotated, pairs]
        return cls(
            input_norm=_RMSNorm.from_module(spec.module.input_layernorm),
            qkv=FusedLinear(spec.qkv, dtype, order.flatten()),
            heads=spec.heads,
            head_dim=spec.head_dim,
            qk_norm=None if norm is None else _RMSNorm(norm[0].detach()[:, pairs], norm[1]),
            scoring=spec.scoring,
            out=FusedLinear([spec.out], dtype),
            post_attention_norm=_RMSNorm.from_module(spec.module.post_attention_layernorm),
            gate_up=FusedLinear(spec.gate_up, dtype),
            activation=spec.module.mlp.act_fn,
            down=FusedLinear([spec.down], dtype),
        )


class DecodeForward:
    """Forward pass of a Llama-shaped model from fused weights.

    It holds a second copy of the projection weights, fused and in the compute dtype, until :meth:`release`; call that when
    the weights change. The residual stream and the norms are float32, as under autocast in training.
    """

    def __init__(self, causal: nn.Module, *, dtype: torch.dtype) -> None:
        self._causal, self._dtype = causal, dtype
        self._decoder: Any = causal.get_decoder()  # type: ignore[operator]
        self._weights: Any = None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Enter the compute mode; weights are copied at the first entry after :meth:`release`."""
        if self._weights is None:
            with torch.no_grad():
                self._weights = self._fused()
        with torch.inference_mode():
            yield

    def release(self) -> None:
        """Drop the fused weights: the model's have changed, or nothing needs them."""
        self._weights = None

    def _fused(self) -> Any:
        """Return the fused weights: layers, last norm, output layer."""
        output = FusedLinear([self._causal.get_output_embeddings()], self._dtype)  # type: ignore[operator]
        layers = [_DecodeLayer.from_spec(spec, self._dtype) for spec in layers_of(self._causal)]
        return layers, _RMSNorm.from_module(self._decoder.norm), output

    def hidden(self, ids: Tensor, context: AttentionContext) -> Tensor:
        batch, length = ids.shape
        hidden = self._decoder.embed_tokens(ids)
        cos, sin = self._decoder.rotary_emb(hidden, context.position_ids)
        half = cos.shape[-1] // 2  # the second half repeats the first
        rotary = torch.complex(cos[..., :half].float(), sin[..., :half].float())[:, :, None]  # [batch, length, 1, half]
        layers, norm, _ = self._weights
        for index, layer in enumerate(layers):
            query, key, value = self._heads(layer, layer.input_norm(hidden), rotary)
            mixed = context.attend(index, query, key, value, layer.scoring)
            hidden = hidden + layer.out(mixed.reshape(batch, length, -1))
            gate, up = layer.gate_up(layer.post_attention_norm(hidden)).chunk(2, -1)
            hidden = hidden + layer.down(layer.activation(gate).mul_(up))
        return norm(hidden)

    def logits(self, ids: Tensor, context: AttentionContext) -> Tensor:
        return self._weights[2](self.hidden(ids, context))

    def _heads(self, layer: _DecodeLayer, states: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[batch, heads, length, head_dim]``, queries and keys rotated."""
        queries, keys, values = layer.heads
        heads = layer.qkv(states).unflatten(-1, (-1, layer.head_dim))
        rotated, value = heads.split_with_sizes((queries + keys, values), 2)
        rotated = rotated.float()
        if layer.qk_norm is not None:
            rotated = layer.qk_norm(rotated)
        rotated = (rotated.view(torch.complex64) * rotary).view(torch.float32)
        query, key = rotated.to(self._dtype).split_with_sizes((queries, keys), 2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
