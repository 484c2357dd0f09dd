"""Turns the simulated GPU on in a process that has loaded its driver."""

from __future__ import annotations

import types
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._triton
from gpu_simulation.operators import caller
from support.simulated_cuda import graphs, sharing, streams
from support.simulated_cuda.counters import COUNTERS
from support.simulated_cuda.tensors import SimulatedTensor
from support.varlen_reference import register as register_varlen
from torch import Tensor
from torch.utils._device import _device_constructors

from hone.models.kernels import cuda as kernels

MEMORY = 80 * 2**30
"""Bytes that the GPU says it has. None is reserved."""
PROPERTIES = types.SimpleNamespace(
    name="Simulated H100", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, uuid="simulated"
)


def turn_on() -> None:
    """Make ``cuda:0`` usable in every thread of this process, for good."""
    _register_allocations()
    _answer_as_driver()
    sharing.turn_on()
    register_varlen()
    kernels._has_triton = lambda: True  # the fused operators then run their references
    torch.utils._triton.has_triton = lambda: False  # torch.compile would make code for a real GPU
    F.scaled_dot_product_attention = _attention(F.scaled_dot_product_attention)
    torch.__future__.set_swap_module_params_on_conversion(True)  # a wrapper cannot take the data of a plain tensor
    _device_constructors()  # torch keeps the originals, so that `with torch.device(...)` still knows them
    torch.tensor, torch.as_tensor = _sent(torch.tensor), _sent(torch.as_tensor)


def _register_allocations() -> None:
    """Let torch allocate on CUDA: all its factory functions, and copies from the host, begin with these operators."""
    global _LIBRARY

    def empty(size: Any, *, device: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
        tensor = SimulatedTensor(torch.ops.aten.empty.memory_format(size, device="cpu", **options))
        tensor.expandable = sharing.segments_expand()
        return tensor

    def empty_strided(size: Any, stride: Any, *, device: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
        return SimulatedTensor(torch.ops.aten.empty_strided.default(size, stride, device="cpu", **options))

    _LIBRARY = torch.library.Library("aten", "IMPL")
    _LIBRARY.impl("empty.memory_format", empty, "CUDA")
    _LIBRARY.impl("empty_strided", empty_strided, "CUDA")


_LIBRARY: torch.library.Library | None = None
"""Holds the registrations: they end with it."""


def _sent(make: Any) -> Any:
    """Let a function that makes a tensor of Python numbers make it on the host, then send it, as CUDA does in the end."""

    def made(data: Any, *args: Any, device: Any = None, requires_grad: bool = False, **options: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            options |= {"requires_grad": True} if requires_grad else {}
            return make(data, *args, device=device, **options)
        return make(data, *args, device="cpu", **options).to(device).requires_grad_(requires_grad)

    return made


def _answer_as_driver() -> None:
    """Answer the questions of ``torch.cuda``."""

    def answer(value: Any) -> Any:
        return lambda *args, **kwargs: value

    def synchronize(device: Any = None) -> None:
        COUNTERS.waits[f"synchronize in {caller()}"] += 1
        graphs.refuse_in_capture("synchronize")
        streams.wait_for_all()
        graphs.finish_copies()

    values: dict[str, Any] = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("_lazy_init", "empty_cache", "reset_peak_memory_stats", "set_device"), None),
        **dict.fromkeys(("manual_seed", "manual_seed_all", "set_rng_state"), None),
        **dict.fromkeys(("max_memory_allocated", "memory_allocated", "memory_reserved"), 2**20),
        "device_count": 1,
        "current_device": 0,
        "get_device_name": PROPERTIES.name,
        "get_device_properties": PROPERTIES,
        "get_device_capability": (PROPERTIES.major, PROPERTIES.minor),
        "mem_get_info": (MEMORY, MEMORY),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for name, value in values.items():
        setattr(torch.cuda, name, answer(value))  # a function for each name: torch.compile tells them apart
    torch.cuda.synchronize = synchronize
    torch._C._cuda_getCurrentRawStream = answer(0)  # type: ignore[attr-defined]  # bitsandbytes asks for it when PEFT loads it
    for name, replacement in {
        "CUDAGraph": graphs.SimulatedGraph,
        "graph": graphs.capture,
        "Event": streams.SimulatedEvent,
        "Stream": streams.SimulatedStream,
        "current_stream": streams.current_stream,
        "stream": streams.stream,
    }.items():
        setattr(torch.cuda, name, replacement)


def _attention(original: Any) -> Any:
    """Replace attention on the simulated GPU by one kernel, forward and backward, as CUDA's fused kernels are."""

    def attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(query, SimulatedTensor):
            return original(query, key, value, *args, **kwargs)
        if torch.is_autocast_enabled("cuda"):
            query, key, value = (x.to(torch.get_autocast_dtype("cuda")) for x in (query, key, value))
        return _FusedAttention.apply(query, key, value, original, args, kwargs)  # type: ignore[return-value]

    return attention


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        on_host = [x.memory if isinstance(x, SimulatedTensor) else x for x in args]
        options = {name: x.memory if isinstance(x, SimulatedTensor) else x for name, x in kwargs.items()}
        COUNTERS.launches[f"attention in {caller()}"] += 1
        inputs = [x.memory.detach() for x in (query, key, value)]
        if not any(ctx.needs_input_grad):
            return SimulatedTensor(function(*inputs, *on_host, **options))
        inputs = [x.requires_grad_() for x in inputs]
        with torch.enable_grad():
            ctx.output = function(*inputs, *on_host, **options)
        ctx.inputs = inputs
        return SimulatedTensor(ctx.output.detach())

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        COUNTERS.launches[f"attention backward in {caller()}"] += 1
        gradients = torch.autograd.grad(ctx.output, ctx.inputs, grads[0].memory)
        return (*map(SimulatedTensor, gradients), None, None, None)
