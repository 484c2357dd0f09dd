"""Attention of packed sequences that :func:`torch.compile` can trace, without graph breaks and without guards on lengths.

On CUDA the variable-length call is traced: it is an operator of torch. Everything else depends on the number and the lengths of the
sequences, so it is one operator, ``hone::attend``, which finds the context by a number in a tensor. Its backward pass keeps the inputs
alone.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor

from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.dtypes import compute_dtype

_CONTEXTS: dict[int, PackedContext] = {}
"""Contexts by number. An entry lives as long as the memory of the tensor with its number, which saved graphs share."""
_NUMBERS = itertools.count()


class TraceableContext:
    """An attention context for compiled layers, with the attention of a packed context."""

    def __init__(self, context: PackedContext) -> None:
        self.position_ids = context.position_ids  # ``[1, N]``
        number = next(_NUMBERS)
        self.number = torch.tensor(number)  # tensor on the CPU with the number of the packed context
        _CONTEXTS[number] = context
        weakref.finalize(self.number.untyped_storage(), _CONTEXTS.pop, number)
        device = self.position_ids.device
        usable = device.type != "cpu" and varlen.device_obstacle(device) is None
        # arguments of the variable-length call; None where the device has no such call
        self.plan = context.varlen_plan if usable else None
        if self.plan is not None:
            gather = self.plan.gather
            tensors = [self.plan.query_ends, self.plan.key_ends]
            for tensor in tensors + ([] if gather is None else [gather.source, gather.slots, gather.starts]):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        if self.plan is not None and varlen.states_obstacle(query, value, scoring) is None:
            rows = [states.squeeze(0).transpose(0, 1).contiguous() for states in (query, key, value)]
            return varlen.causal_attention(rows[0], rows[1], rows[2], scoring, self.plan)[None]
        return torch.ops.hone.attend(
            *(query, key, value, scoring.sinks, self.number),
            *(scoring.scale, scoring.window, scoring.softcap, compute_dtype(query)),
        )

    def mix(self, layer: int, mixer: Any, *states: Tensor) -> Tensor:
        """Refuse: layers that mix states in a way of their own are not compiled."""
        raise NotImplementedError("a layer with a mixer of its own is not compiled")


_LIBRARY = torch.library.Library("hone", "FRAGMENT")
_OPTIONS = "Tensor? sinks, Tensor number, float scale, int? window, float? softcap, ScalarType compute"
_LIBRARY.define(f"attend(Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> Tensor")
_LIBRARY.define(f"attend_gradients(Tensor incoming, Tensor query, Tensor key, Tensor value, {_OPTIONS}) -> Tensor[]")


def _attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, number: Tensor, *options: Any) -> Tensor:
    context, scoring, states = _prepared(query, key, value, sinks, number, *options)
    with torch.no_grad():
        return context.attend(0, *states, scoring).to(value.dtype).contiguous()


def _attend_gradients(
    incoming: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, number: Tensor, *options: Any
) -> list[Tensor]:
    context, scoring, states = _prepared(query, key, value, sinks, number, *options)
    with _autograd_enabled():
        gradients = context.attend_gradients(incoming.to(states[2].dtype), *states, scoring)
    inputs = (query, key, value, sinks) if sinks is not None else (query, key, value)
    return [
        gradient.to(source.dtype).contiguous(memory_format=torch.contiguous_format)
        for gradient, source in zip(gradients, inputs, strict=True)
    ]


def _prepared(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    number: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    compute: torch.dtype,
) -> tuple[PackedContext, Scoring, tuple[Tensor, Tensor, Tensor]]:
    """Return context, scoring, and the states, in the compute dtype where torch's own kernels compute, as autocast would have it."""
    context, scoring = _CONTEXTS[int(number)], Scoring(scale, window, softcap, sinks)
    if not context.computes_in_blocks(query, scoring):
        query, key, value = (states.to(compute) for states in (query, key, value))
    return context, scoring, (query, key, value)


def _autograd_enabled() -> torch._C._ForceDispatchKeyGuard:
    """Let autograd record within an operator, where it is excluded."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradCPU", "AutogradCUDA", "AutogradOther", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _shape_of_output(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    return value.new_empty(1, query.shape[2], query.shape[1], value.shape[3])


def _shapes_of_gradients(
    incoming: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *options: Any
) -> list[Tensor]:
    inputs = (query, key, value) if sinks is None else (query, key, value, sinks)
    return [states.new_empty(states.shape) for states in inputs]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, sinks, number, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, sinks, number)


def _backward(ctx: Any, incoming: Tensor) -> tuple[Any, ...]:
    gradients = torch.ops.hone.attend_gradients(incoming, *ctx.saved_tensors, *ctx.options)
    sinks = gradients[3] if len(gradients) > 3 else None
    return gradients[0], gradients[1], gradients[2], sinks, None, None, None, None, None


for _name, _compute, _shapes in (
    ("attend", _attend, _shape_of_output),
    ("attend_gradients", _attend_gradients, _shapes_of_gradients),
):
    _LIBRARY.impl(_name, _compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"hone::{_name}", _shapes, lib=_LIBRARY)
torch.library.register_autograd("hone::attend", _backward, setup_context=_keep, lib=_LIBRARY)
