"""Compile the decoder layers of models that no fused layer computes, each without a graph break, for all sequence lengths.

Layers of the same class share their compiled code, which has one version for each kind of layer and with or without gradient.
Gradient checkpointing is inside what is compiled. A layer that cannot be compiled computes as usual, with one warning that names the
reason; the backward pass is compiled with the forward pass, so that this holds for its errors too.
"""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hone.models.attention.packed import PackedContext
from hone.models.attention.traceable import TraceableContext
from hone.models.inputs import PackedSequences
from hone.models.llama import cuda as llama_cuda
from hone.models.llama import train as llama_train
from hone.models.loading import causal_lm, layers_of
from hone.models.registry import family_of

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
