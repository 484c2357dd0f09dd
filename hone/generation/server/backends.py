"""Engines that a server can start, by name; a backend is imported only when its engine starts."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from hone.generation.server.backend import Backend, BackendSettings
from hone.generation.server.stand_in import provide_torchvision

_BACKENDS = {
    "vllm": "vllm_backend:VllmBackend",
    "vllm with LoRA": "vllm_adapters:VllmAdapterBackend",
    "sglang": "sglang_backend:SglangBackend",
    "trtllm": "trtllm_backend:TrtllmBackend.start",
    "native": "native_backend:NativeBackend",
}
"""Engine to ``module:callable``: a class, or a coroutine function that starts the engine."""


async def open_backend(settings: BackendSettings) -> Backend:
    """Start the engine of the settings.

    Raises:
        ValueError: there is no backend for the engine.
    """
    name = "vllm with LoRA" if settings.engine == "vllm" and settings.lora else settings.engine
    if name not in _BACKENDS:
        raise ValueError(f"no server for engine '{settings.engine}'")
    if settings.engine == "vllm":
        provide_torchvision(settings.model)
    module, _, attributes = _BACKENDS[name].partition(":")
    start: Any = import_module(f"hone.generation.server.{module}")
    for attribute in attributes.split("."):
        start = getattr(start, attribute)
    backend = start(settings)
    return await backend if inspect.isawaitable(backend) else backend
