"""Tensors of the simulated GPU: each wraps a tensor in host memory, and every operator on it computes there.

Operators arrive at :func:`execute` below autograd, so gradients, hooks and autocast are torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from gpu_simulation.operators import ALLOCATIONS, VIEWS, caller, cost_of, is_composite
from support.simulated_cuda.counters import COUNTERS
from support.simulated_cuda.graphs import CAPTURE, arrive_before_reading, begin_copy, refuse_in_capture
from support.simulated_cuda.streams import note_work
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

CUDA, HOST = torch.device("cuda", 0), torch.device("cpu")

_READS = frozenset(["_local_scalar_dense", "equal", "is_nonzero"])
"""Operators that return a Python number: the host waits for it."""
_SIZED_BY_VALUES = frozenset(["nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive", "bincount"])
"""Operators whose result has a shape that depends on values: the host waits for it."""
_INDEXED = frozenset(["index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"])
"""Operators that take indices on the host, and send them."""

Kernel = Callable[..., Any]


def _histogram(values: Tensor, *settings: Any) -> Tensor:
    return torch.histc(values.double(), *settings).to(values.dtype)


CUDA_ONLY: dict[str, Kernel] = {"aten::histc": _histogram}  # of integers
"""Kernels that torch has for CUDA and not for CPUs, by qualified name of the operator; they take and return tensors on the host."""


class SimulatedTensor(Tensor):
    """A tensor that says ``cuda:0``.

    Attributes:
        memory: the same tensor on the host.
        expandable: whether it was allocated in an expandable segment.
    """

    memory: Tensor
    expandable = False

    @staticmethod
    def __new__(cls, memory: Tensor, requires_grad: bool = False) -> SimulatedTensor:
        """Wrap ``memory``: views of it are views of this tensor."""
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=CUDA,
            requires_grad=requires_grad,
        )

    def __init__(self, memory: Tensor, requires_grad: bool = False) -> None:
        self.memory = memory

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.memory})"

    def new_tensor(self, data: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:  # type: ignore[override]
        """Return a tensor of Python numbers on this device."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.device, **options)

    def data_ptr(self) -> int:
        """Return the address of the memory."""
        return self.memory.data_ptr()

    def tolist(self) -> Any:
        """Return the numbers; the host waits for them."""
        return self.cpu().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = SimulatedTensor(self.memory.detach().clone()).requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy.detach(), self.requires_grad)
        memo[id(self)] = copy
        return copy

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return execute(func, args, kwargs or {})


def execute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator of which at least one argument is on the simulated GPU.

    Raises:
        RuntimeError: another argument is on the host, and has more than a single number.
    """
    name = func._schema.name.split("::")[1]
    if is_composite(func):  # in inference mode they arrive whole
        result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if name == "_to_copy":
        return _to_copy(func, args[0], dict(kwargs))
    if name == "copy_":
        return _copy(*args, **kwargs)
    tensors = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
    simulated = [value for value in tensors if isinstance(value, SimulatedTensor)]
    _refuse_mixture(func, name, [value for value in tensors if not isinstance(value, SimulatedTensor)])
    _count_waits(name, args, kwargs)
    compute = CUDA_ONLY.get(func._schema.name, func)
    on_host = {key: HOST if key == "device" else value for key, value in kwargs.items()}
    words, options = tree_map(_memory, tuple(args)), tree_map(_memory, on_host)
    result = _computed(func, lambda: compute(*words, **options), words, options)
    wrappers = {id(value.memory): value for value in simulated}  # in-place operators return their argument
    wrap = lambda x: wrappers[id(x)] if id(x) in wrappers else SimulatedTensor(x)  # noqa: E731
    result = tree_map(lambda x: wrap(x) if isinstance(x, Tensor) else x, result)
    if name not in VIEWS and name not in ALLOCATIONS and not CAPTURE:
        outputs = [value for value in tree_flatten(result)[0] if isinstance(value, Tensor)]
        COUNTERS.launches[_place(name)] += cost_of(name, args, simulated, outputs).launches
    return result


def _computed(func: Any, compute: Callable[[], Any], words: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """Compute an operator on memory of the host, or note it in the graph that is being captured."""
    named = {argument.name: value for argument, value in zip(func._schema.arguments, words, strict=False)} | options
    changed = [x.name for x in func._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    written = [named[name] for name in changed if isinstance(named.get(name), Tensor)]
    sources = [x for x in tree_flatten((words, options))[0] if isinstance(x, Tensor)]
    if CAPTURE:
        return CAPTURE[0].note(compute, written, sources)
    if func._schema.name.split("::")[1] not in VIEWS:
        note_work(func._schema.name, [x for x in sources if all(x is not y for y in written)], written)
    return compute()


def _memory(value: Any) -> Any:
    return value.memory if isinstance(value, SimulatedTensor) else value


def _place(name: str) -> str:
    return f"{name} in {caller()}"


def _refuse_mixture(func: Any, name: str, on_host: list[Tensor]) -> None:
    large = [tuple(value.shape) for value in on_host if value.dim()]
    if large:
        refuse_in_capture(f"{func} with a tensor on the host")
    if large and name in _INDEXED:
        COUNTERS.to_device[_place(name)] += len(large)
    elif large:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but {func} got cuda:0 and cpu (shapes {large})"
        )


def _count_waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    masked = name in _INDEXED and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1])
    unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
    if name in _READS or name in _SIZED_BY_VALUES or masked or unsized:
        refuse_in_capture(name)
        COUNTERS.waits[_place(f"{name} with a mask" if masked else name)] += 1


def _to_copy(func: Any, source: SimulatedTensor, kwargs: dict[str, Any]) -> Tensor:
    """Convert: on the GPU that is a kernel, to the host a copy."""
    target = kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    if target is None or torch.device(target).type == "cuda":
        result = _computed(func, lambda: func(source.memory, **kwargs), (source.memory,), kwargs)
        COUNTERS.launches[_place("_to_copy")] += not CAPTURE
        return SimulatedTensor(result)
    result = func(source.memory, **kwargs)
    _note_copy_to_host(kwargs.get("non_blocking", False))
    return result


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    if not isinstance(target, SimulatedTensor):
        _note_copy_to_host(non_blocking)
        note_work("a copy to the host", [_memory(source)], [target])
        (begin_copy if non_blocking else Tensor.copy_)(target, _memory(source))
        return target
    if isinstance(source, SimulatedTensor):
        COUNTERS.launches[_place("copy_")] += not CAPTURE
    elif source.dim() or not non_blocking:
        refuse_in_capture("a copy to the device")
        arrive_before_reading(source)
        COUNTERS.to_device[_place("copy_")] += 1
    words = target.memory, _memory(source)
    _computed(torch.ops.aten.copy_.default, lambda: words[0].copy_(words[1]), words, {})
    return target


def _note_copy_to_host(non_blocking: bool) -> None:
    refuse_in_capture("a copy to the host")
    COUNTERS.to_host[_place("copy_")] += 1
    if not non_blocking:
        COUNTERS.waits[_place("copy to the host")] += 1
