"""The forward pass of a decoder for generation: of Llama's shape in few operations, of any other shape by its module.

A decode step is a few rows through many small operations, and what it costs is mostly their number. So models whose layers
are of a known kind are computed here again from their parameters, with the projections that share an input as one product:

    hidden -> rms norm -> [q k v] -> (head norms) -> rotary -> attention -> o -> + hidden
           -> rms norm -> [gate up] -> act(gate) * up -> down -> + hidden

Every other model (adapters, mixtures of experts, norms or scales of another kind) goes through its own module, the golden
path; a test holds the two together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM
from transformers.models.mistral.modeling_mistral import MistralAttention

from hone.generation.attention import Layout, Scoring
from hone.generation.products import onednn_packs

LLAMA_SHAPED = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


class _Linear:
    """One product for projections that share their input, its weights laid out for the library that multiplies.

    On the CPU weights are packed for oneDNN once, because to do that in every step would cost more than the product itself
    while few rows are decoded.

    Args:
        modules: the projections.
        dtype: in which it is computed.
        order: of the outputs of all, or None for as they are.
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


class _Norm:
    """Root-mean-square norm (Zhang and Sennrich 2019), spelled out in the fewest operations: torch's own takes ten times as
    long for a long prompt on the CPU.

    Args:
        weight: its last dimension is what is normed.
        epsilon: added to the mean of squares.
    """

    def __init__(self, weight: Tensor, epsilon: float) -> None:
        self._weight, self._epsilon = weight, torch.tensor(epsilon, device=weight.device)

    def __call__(self, states: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(states, 2, -1, True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / states.shape[-1]).rsqrt_()
        return (states * scale).mul_(self._weight)


@dataclass(frozen=True)
class _Layer:
    """A layer's parts.

    Attributes:
        heads: of the queries, the keys and the values, in the order in which ``qkv`` gives them.
        head_dim: of each.
        head_norm: of all queries and keys at once, or None. In these, what rotary turns together stands side by side.
    """

    input_norm: _Norm
    qkv: _Linear
    heads: tuple[int, int, int]
    head_dim: int
    head_norm: _Norm | None
    scoring: Scoring
    out: _Linear
    post_attention_norm: _Norm
    gate_up: _Linear
    activation: Any
    down: _Linear

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype) -> _Layer:
        attention, projections = layer.self_attn, _attention_projections(layer)
        heads = [projection.out_features // attention.head_dim for projection in projections]
        pairs = torch.arange(attention.head_dim).unflatten(0, (2, -1)).t().flatten()
        head_norm = None
        if hasattr(attention, "q_norm"):
            weights = (attention.q_norm.weight, attention.k_norm.weight)
            joint = torch.cat([w.detach().expand(count, -1) for w, count in zip(weights, heads[:2], strict=True)])
            head_norm = _Norm(joint[:, pairs], attention.q_norm.variance_epsilon)
        order = torch.arange(sum(heads) * attention.head_dim).unflatten(0, (-1, attention.head_dim)).clone()
        order[: heads[0] + heads[1]] = order[: heads[0] + heads[1], pairs]
        return cls(
            input_norm=_norm_of(layer.input_layernorm),
            qkv=_Linear(projections, dtype, order.flatten()),
            heads=(heads[0], heads[1], heads[2]),
            head_dim=attention.head_dim,
            head_norm=head_norm,
            scoring=Scoring(attention.scaling, attention_window(attention)),
            out=_Linear([attention.o_proj], dtype),
            post_attention_norm=_norm_of(layer.post_attention_layernorm),
            gate_up=_Linear(_mlp_projections(layer)[:2], dtype),
            activation=layer.mlp.act_fn,
            down=_Linear([layer.mlp.down_proj], dtype),
        )


class ModuleForward:
    """Any model, by its own module.

    Args:
        causal: the model.
        bfloat16: whether products are computed in bfloat16.
    """

    def __init__(self, causal: nn.Module, *, bfloat16: bool) -> None:
        self._causal, self._bfloat16 = causal, bfloat16
        self._decoder: Any = causal.get_decoder()  # type: ignore[operator]

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The mode in which it computes.

        Autocast keeps the bfloat16 copy of a weight for the length of the block, if the weight requires a gradient; so
        within the block all do.
        """
        parameters = list(self._causal.parameters())
        frozen = [p for p in parameters if not p.requires_grad] if self._bfloat16 else []
        for parameter in frozen:
            parameter.requires_grad_(True)
        try:
            with torch.no_grad(), torch.autocast(parameters[0].device.type, torch.bfloat16, self._bfloat16):
                yield
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)

    def release(self) -> None:
        """Nothing is kept."""

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        """Last hidden states ``[batch, length, H]`` of ``ids [batch, length]``; keys and values go where the layout says."""
        return self._decoder(
            input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False
        ).last_hidden_state

    def logits(self, ids: Tensor, layout: Layout) -> Tensor:
        """Logits ``[batch, length, V]``."""
        return self._causal(input_ids=ids, position_ids=layout.position_ids, layout=layout, use_cache=False).logits


class FusedForward:
    """A Llama-shaped model computed from its parameters in few operations.

    It holds the projection weights once more, fused and in the compute dtype, until :meth:`release`; whoever changes the
    weights calls that. The residual stream and the norms are float32, as under autocast in training.

    Args:
        causal: the model; :meth:`fits` must hold.
        bfloat16: whether products are computed in bfloat16.
    """

    def __init__(self, causal: nn.Module, *, bfloat16: bool) -> None:
        self._causal, self._dtype = causal, torch.bfloat16 if bfloat16 else torch.float32
        self._decoder: Any = causal.get_decoder()  # type: ignore[operator]
        self._layers: list[_Layer] = []
        self._norm: Any = None
        self._logits: Any = None

    @staticmethod
    def fits(causal: nn.Module) -> bool:
        """Whether the model is of a known kind, with nothing (adapters, hooks) in place of its parts or between them."""
        if type(causal) not in LLAMA_SHAPED:
            return False
        linears = [causal.get_output_embeddings()]  # type: ignore[operator]
        for layer in causal.get_decoder().layers:  # type: ignore[operator]
            linears += [*_attention_projections(layer), layer.self_attn.o_proj, *_mlp_projections(layer)]
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in causal.modules())
        return not hooked and all(type(module) is nn.Linear for module in linears)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """The mode in which it computes, with the weights as they were at the first time after :meth:`release`."""
        if not self._layers:
            self._layers = [_Layer.of(layer, self._dtype) for layer in self._decoder.layers]
            self._norm = _norm_of(self._decoder.norm)
            self._logits = _Linear([self._causal.get_output_embeddings()], self._dtype)  # type: ignore[operator]
        with torch.inference_mode():
            yield

    def release(self) -> None:
        """Forget the fused weights: they have changed, or nothing needs them."""
        self._layers, self._norm, self._logits = [], None, None

    def hidden(self, ids: Tensor, layout: Layout) -> Tensor:
        """Last hidden states ``[batch, length, H]`` of ``ids [batch, length]``; keys and values go where the layout says."""
        batch, length = ids.shape
        hidden = self._decoder.embed_tokens(ids)
        cos, sin = self._decoder.rotary_emb(hidden, layout.position_ids)
        half = cos.shape[-1] // 2  # the second repeats the first
        rotary = torch.complex(cos[..., :half].float(), sin[..., :half].float())[:, :, None]  # [batch, length, 1, half]
        for index, layer in enumerate(self._layers):
            query, key, value = self._heads(layer, layer.input_norm(hidden), rotary)
            mixed = layout.attend(index, query, key, value, layer.scoring)
            hidden = hidden + layer.out(mixed.reshape(batch, length, -1))
            gate, up = layer.gate_up(layer.post_attention_norm(hidden)).chunk(2, -1)
            hidden = hidden + layer.down(layer.activation(gate).mul_(up))
        return self._norm(hidden)

    def logits(self, ids: Tensor, layout: Layout) -> Tensor:
        """Logits ``[batch, length, V]``."""
        return self._logits(self.hidden(ids, layout))

    def _heads(self, layer: _Layer, states: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values ``[batch, heads, length, head_dim]``, rotated."""
        queries, keys, values = layer.heads
        heads = layer.qkv(states).unflatten(-1, (-1, layer.head_dim))
        rotated, value = heads.split_with_sizes((queries + keys, values), 2)
        rotated = rotated.float()
        if layer.head_norm is not None:
            rotated = layer.head_norm(rotated)
        rotated = (rotated.view(torch.complex64) * rotary).view(torch.float32)
        query, key = rotated.to(self._dtype).split_with_sizes((queries, keys), 2)
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _attention_projections(layer: Any) -> list[nn.Linear]:
    return [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]


def attention_window(attention: Any) -> int | None:
    """Qwen's layers know their own window, Mistral's read it from the config, Llama's have none."""
    if type(attention) is MistralAttention:
        return attention.config.sliding_window
    return getattr(attention, "sliding_window", None)


def _mlp_projections(layer: Any) -> list[nn.Linear]:
    return [layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj]


def _norm_of(module: Any) -> _Norm:
    return _Norm(module.weight.detach(), module.variance_epsilon)
