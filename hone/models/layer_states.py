"""Observation of a model's layers during a forward pass, without a change to what the pass computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from hone.models.llama import cuda as llama_cuda
from hone.models.llama import train as llama_train
from hone.models.llama.train import LAYER_OBSERVER

Observer = Callable[[str, int, Tensor], None]
"""("hidden" or "router", index of the layer, output ``[..., N, H]`` of the layer or ``[..., N, experts]`` of its router)."""


@contextlib.contextmanager
def observing(causal: nn.Module, observer: Observer) -> Iterator[None]:
    """Within the block, pass the outputs of layers and routers of a training forward pass to ``observer``.

    A hook would move a Llama-shaped model off its CPU executor, so that executor reports its layers itself.
    """
    if not (llama_train.supports_training(causal) or llama_cuda.supports_training(causal)):
        with layer_hooks(causal, observer):
            yield
        return
    token = LAYER_OBSERVER.set(lambda layer, hidden: observer("hidden", layer, hidden))
    try:
        yield
    finally:
        LAYER_OBSERVER.reset(token)


@contextlib.contextmanager
def layer_hooks(causal: nn.Module, observer: Observer) -> Iterator[None]:
    """Within the block, pass the outputs of layers and routers to ``observer`` by hooks on the modules."""
    handles = []
    for index, layer in enumerate(causal.get_decoder().layers):  # type: ignore[operator]
        handles.append(layer.register_forward_hook(_hook("hidden", index, observer)))
        routers = [module for module in layer.modules() if "Router" in type(module).__name__]
        handles += [module.register_forward_hook(_hook("router", index, observer)) for module in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(kind: str, index: int, observer: Observer) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, arguments: Any, output: Any) -> None:
        observer(kind, index, output[0] if isinstance(output, tuple) else output)

    return hook
