"""Compile the decoder layers of models that no fused layer computes, each without a graph break, for all sequence lengths.

Layers of the same class share their compiled code, which has one version for each kind of layer and with or without gradient.
Gradient checkpointing is inside what is compiled. A layer that cannot be compiled computes as usual, with one warning that names the
reason; the backward pass is compiled with the forward pass, so that this holds for its errors too.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hone.models.attention import varlen
from hone.models.attention.context import Scoring
from hone.models.attention.packed import PackedContext
from hone.models.devices import compute_dtype
from hone.models.four_bits import packed_layers
from hone.models.images import find_processor
from hone.models.inputs import PackedSequences
from hone.models.llama import cuda as llama_cuda
from hone.models.llama import train as llama_train
from hone.models.loading import causal_lm, layers_of
from hone.models.registry import family_of

_CONTEXTS: dict[int, PackedContext] = {}
"""Contexts by number. An entry lives as long as the memory of the tensor with its number, which saved graphs share."""
_NUMBERS = itertools.count()


class TraceableContext:
    """An attention context for compiled layers, with the attention of a packed context: no graph breaks, no guards on lengths.

    On CUDA the variable-length call is traced: it is an operator of torch. Everything else depends on the number and the
    lengths of the sequences, so it is one operator, ``hone::attend``, which finds the context by a number in a tensor. Its
    backward pass keeps the inputs alone.
    """

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


log = logging.getLogger("hone.models.compiled")

AUTO, ALWAYS, NEVER = "auto", "always", "never"
VERSIONS = 32
"""Most versions of a layer's code: kinds of layers, passes with and without gradient, sizes."""


Compiler = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""A backend of :func:`torch.compile`."""


class CompiledLayers:
    """The compiled layers of a model, whose ``forward`` is replaced."""

    def __init__(self, layers: list[nn.Module], compiler: str | Compiler = "inductor") -> None:
        self.obstacles: dict[str, str] = {}  # why layers compute uncompiled, by the name of their class
        self._count = len(layers)
        backend = _both_passes(compiler)
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VERSIONS)
        for layer in layers:
            layer.forward = _CompiledForward(layer, self, backend)

    def traceable(self, packed: PackedSequences) -> PackedSequences:
        """Return the micro-batch with a context that compiled layers accept; other contexts remain, and are computed uncompiled."""
        if not isinstance(packed.context, PackedContext):
            self.note("all layers", f"{type(packed.context).__name__} is not traced")
            return packed
        return dataclasses.replace(packed, context=TraceableContext(packed.context))

    def note(self, name: str, reason: str) -> None:
        """Note why the layers of a class compute uncompiled, with a warning for each class."""
        if name not in self.obstacles:
            self.obstacles[name] = reason
            log.warning("%s: %d layers of the model may compute uncompiled: %s", name, self._count, reason)


class _CompiledForward:
    """The ``forward`` of a compiled layer: that of its class, which FSDP changes after this object is made."""

    def __init__(self, layer: nn.Module, layers: CompiledLayers, compiler: Compiler) -> None:
        self._layer, self._layers, self._compiler = layer, layers, compiler
        self._name = type(layer).__name__
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = types.MethodType(type(self._layer).forward, self._layer)
        context = kwargs.get("context")
        if not isinstance(context, TraceableContext) or self._name in self._layers.obstacles:
            return plain(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(plain, fullgraph=True, backend=self._compiler)
        _mark_tokens(context.position_ids.shape[1], args, kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except Exception as error:
            if not _is_of_compiler(error):
                raise
            self._layers.note(self._name, str(error).strip().splitlines()[0])
            return plain(*args, **kwargs)


def compile_layers(
    model: nn.Module, device: torch.device, choice: str, compiler: str | Compiler = "inductor"
) -> CompiledLayers | None:
    """Compile the layers of ``model``, with its adapters, unless Hone's fused layers compute them; None where it stays as it is.

    ``auto`` compiles on CUDA, ``always`` on a CPU too.
    """
    if choice == NEVER or (choice == AUTO and device.type != "cuda"):
        return None
    causal = causal_lm(model)
    if llama_train.supports_training(causal) or llama_cuda.supports_training(causal):
        return None
    layers = layers_of(causal)
    obstacle = _obstacle(causal, layers) or (_compiler_obstacle(device) if compiler == "inductor" else None)
    if obstacle is not None:
        log.warning("%s: %d layers stay uncompiled: %s", type(causal).__name__, len(layers), obstacle)
        return None
    log.info("%s: %d layers are compiled at their first use", type(causal).__name__, len(layers))
    return CompiledLayers(layers, compiler)


def _obstacle(causal: nn.Module, layers: list[nn.Module]) -> str | None:
    config: Any = causal.config
    if not layers:
        return "transformers does not name the layers of this architecture"
    if family_of(config.model_type).own_attention:
        return "the family has an attention of its own"
    processor = find_processor(causal)
    if processor is not None and processor.sees_ahead:
        return "the tokens of an image see each other"
    if any(True for _ in packed_layers(causal)):
        return "a compiled graph would keep the matrices that are unpacked from 4 bits until the backward pass"
    if getattr(config, "attention_dropout", 0.0):
        return "attention dropout is on"
    if any(name.rpartition(".")[2] == "experts" for layer in layers for name, _ in layer.named_modules()):
        return "tokens are sent to experts by their values, which a graph without breaks cannot do"
    return None


def _compiler_obstacle(device: torch.device) -> str | None:
    """Return why torch's compiler cannot make code for the device, or None."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton is missing"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "no C++ compiler (g++ or clang++; the variable CXX names another one)"
    return None


def _both_passes(compiler: str | Compiler) -> Compiler:
    """Make ``compiler`` compile the backward pass with the forward pass, so that an error of either ends in the layer's forward."""
    import torch._functorch.config as settings

    backend = torch._dynamo.lookup_backend(compiler)

    def compile_both(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Callable[..., Any]:
        with settings.patch(force_non_lazy_backward_lowering=True):
            return backend(graph, inputs, **options)

    return compile_both


def _is_of_compiler(error: Exception) -> bool:
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.exc import InductorError
    from torch.fx.experimental.symbolic_shapes import ConstraintViolationError

    return isinstance(error, (TorchDynamoException, InductorError, ConstraintViolationError))


def _mark_tokens(tokens: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the compiled code take any number of tokens, which is the second dimension of all states."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == tokens:
            torch._dynamo.maybe_mark_dynamic(value, 1)
