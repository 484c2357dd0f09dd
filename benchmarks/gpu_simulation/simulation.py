"""The meta device in the part of a GPU: tensors without storage, kernels that are recorded instead of run.

Hone's code takes its CUDA path on every device that is not a CPU. What torch lacks on the meta device is added here: autocast, and
the values of small integer tensors, which decide about the shapes of what follows. Attention is recorded as the fused kernel
that CUDA has.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from gpu_simulation.attention import (
    PAGES,
    VARLEN,
    VARLEN_BACKWARD,
    fused_attention,
    record_pages,
    record_varlen,
)
from gpu_simulation.kernels import Kernel
from gpu_simulation.operators import ALLOCATIONS, VIEWS, caller, cost_of, is_composite

META = torch.device("meta")
_LARGEST_KNOWN = 1 << 20
"""Most numbers of an integer tensor whose values are kept."""
_IN_BFLOAT16 = frozenset(
    (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm, torch.addmm)
)
"""Functions that autocast computes in its dtype."""


class Recorder:
    """Collects the kernels of a simulated GPU.

    Attributes:
        kernels: recorded so far, in order.
        copies: number of tensors that the host has sent.
    """

    def __init__(self, precision: _Precision) -> None:
        self.kernels: list[Kernel] = []
        self.copies = 0
        self._precision = precision

    def take(self) -> list[Kernel]:
        """Return the kernels recorded since the last call."""
        kernels, self.kernels = self.kernels, []
        return kernels

    def in_this_precision(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that computes under the autocast of this moment, also when the backward pass calls it."""
        dtype = self._precision.dtype

        def call(*args: Any, **kwargs: Any) -> Any:
            with _Functions(self, self._precision), self._precision.computing_in(dtype):
                return function(*args, **kwargs)

        return call

    def add(self, name: str, **numbers: Any) -> None:
        """Record a kernel."""
        self.kernels.append(Kernel(name, caller(), **numbers))

    def wait(self, name: str) -> None:
        """Record a wait of the host."""
        self.kernels.append(Kernel(name, caller(), launches=0, waits=True))


@contextlib.contextmanager
def simulated_gpu() -> Iterator[Recorder]:
    """Record the kernels of meta tensors within the block; autocast works on the meta device there. Not for several threads."""
    precision = _Precision()
    recorder = Recorder(precision)
    names = ("autocast", "is_autocast_enabled", "get_autocast_dtype")
    originals = {name: getattr(torch, name) for name in names}
    replacements = {
        "autocast": precision.autocast(originals["autocast"]),
        "is_autocast_enabled": _on_meta(lambda: precision.dtype is not None, originals["is_autocast_enabled"]),
        "get_autocast_dtype": _on_meta(lambda: precision.dtype, originals["get_autocast_dtype"]),
    }
    for name, replacement in replacements.items():
        setattr(torch, name, replacement)
    try:
        with _Functions(recorder, precision), _Kernels(recorder):
            yield recorder
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _on_meta(answer: Callable[[], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    def for_device(device_type: str | None = None) -> Any:
        if device_type == "meta":
            return answer()
        return original() if device_type is None else original(device_type)

    return for_device


class _Precision:
    """Autocast for the meta device: matmuls in its dtype, each weight cast once within the outermost block.

    Attributes:
        dtype: that matmuls are computed in; None without autocast.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self._depth = 0
        self._weights: dict[int, Tensor] = {}

    def autocast(self, original: Any) -> Callable[..., Any]:
        """Return a replacement of ``torch.autocast`` that also knows the meta device."""

        def autocast(device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None) -> Any:
            if device_type != "meta":
                return original(device_type, dtype, enabled, cache_enabled)
            return self.computing_in(dtype or torch.bfloat16 if enabled else None)

        return autocast

    @contextlib.contextmanager
    def computing_in(self, dtype: torch.dtype | None) -> Iterator[None]:
        """Compute matmuls in ``dtype`` within the block."""
        before, self.dtype = self.dtype, dtype
        self._depth += 1
        try:
            yield
        finally:
            self.dtype, self._depth = before, self._depth - 1
            if not self._depth:
                self._weights.clear()

    def cast(self, value: Any) -> Any:
        """Return a float32 tensor in the dtype of matmuls, everything else as it is."""
        if self.dtype is None or not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not (value.requires_grad and value.is_leaf):
            return value.to(self.dtype)
        if id(value) not in self._weights:
            self._weights[id(value)] = value.to(self.dtype)
        return self._weights[id(value)]


class _Functions(TorchFunctionMode):
    """Casts the arguments of matmuls, and replaces attention."""

    def __init__(self, recorder: Recorder, precision: _Precision) -> None:
        super().__init__()
        self._recorder, self._precision = recorder, precision

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and _is_meta(kwargs.get("device")):
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(META)  # keeps the values
        cast = self._precision.cast
        if func is F.scaled_dot_product_attention and _is_meta(args[0].device):
            masks = {name: kwargs[name] for name in ("attn_mask",) if name in kwargs}
            query, key, value = map(cast, args[:3])
            causal = kwargs.get("is_causal", False)
            return fused_attention(self._recorder.add, query, key, value, masks.get("attn_mask"), causal=causal)
        if func in _IN_BFLOAT16 and _is_meta(args[0].device):
            args, kwargs = tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


class _Kernels(TorchDispatchMode):
    """Records operators on meta tensors; those on small integer tensors are also computed, on the CPU."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._values = WeakIdKeyDictionary()  # meta tensor -> its values on the CPU

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, target = func._schema.name.split("::")[1], kwargs.get("device")
        inputs = [x for x in _tensors((*args, *kwargs.values())) if x.device.type == "meta"]
        if not inputs and not _is_meta(target):
            return func(*args, **kwargs)
        if is_composite(func):  # in inference mode they arrive whole
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if name == "_local_scalar_dense":
            self._recorder.wait(name)
            known = self._values.get(args[0])
            return _guess(args[0]) if known is None else known.item()
        if name == "_to_copy" and target is not None and (not inputs or not _is_meta(target)):
            return self._between_devices(args[0], kwargs)
        if name == "copy_" and args[1].device.type != "meta" and args[1].dim():
            self._recorder.copies += 1
            return args[0]
        if name in ("nonzero", "index", "index_put_"):
            args = self._with_places(name, args)
            if name == "nonzero":
                return self._remembered(torch.empty(args.shape, dtype=args.dtype, device=META), args)
        if name == PAGES:
            record_pages(self._recorder.add, args, self._values[args[4]])
            return func(*args, **kwargs)
        if name in (VARLEN, VARLEN_BACKWARD):
            query_ends, key_ends = (self._values[x] for x in args if isinstance(x, Tensor) and x.dtype == torch.int32)
            record_varlen(self._recorder.add, name, args, (query_ends, key_ends))
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        outputs = _tensors((result,))
        if name not in VIEWS and name not in ALLOCATIONS:
            read = [x for x in inputs if x is not kwargs.get("out")]
            self._recorder.add(name, **cost_of(name, args, read, outputs)._asdict())
        self._compute(func, args, kwargs, inputs, outputs)
        return result

    def _between_devices(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        dtype = kwargs.get("dtype") or source.dtype
        if source.device.type == "meta":
            self._recorder.wait("to host")
            known = self._values.get(source)
            return torch.zeros(source.shape, dtype=dtype) if known is None else known.to(dtype)
        self._recorder.copies += 1
        sent = torch.empty_strided(source.shape, source.stride(), dtype=dtype, device=META)
        return self._remembered(sent, source.to(dtype))

    def _with_places(self, name: str, args: Any) -> Any:
        """Replace boolean masks by the places where they are true; the host waits to know their number.

        Of ``nonzero`` only these places are returned.
        """
        if name == "nonzero":
            self._note_nonzero(args[0])
            return self._mask(args[0]).nonzero()
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, Tensor) and index.dtype == torch.bool:
                if index.device.type == "meta":
                    self._note_nonzero(index)
                indices += [torch.empty_like(place, device=META) for place in self._mask(index).nonzero().unbind(1)]
            else:
                indices.append(index)
        return args[0], indices, *args[2:]

    def _note_nonzero(self, mask: Tensor) -> None:
        self._recorder.add("nonzero", **cost_of("nonzero", (mask,), (mask,), ())._asdict())
        self._recorder.wait("nonzero")

    def _mask(self, mask: Tensor) -> Tensor:
        """Return the values of a mask; all are true where they are not known."""
        if mask.device.type != "meta":
            return mask
        known = self._values.get(mask)
        return torch.ones(mask.shape, dtype=torch.bool) if known is None else known

    def _remembered(self, tensor: Tensor, values: Tensor) -> Tensor:
        if not values.is_floating_point() and not values.is_complex() and values.numel() <= _LARGEST_KNOWN:
            self._values[tensor] = values
        return tensor

    def _compute(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Compute integer results on the CPU too, if all inputs are known; forget those that change in an unknown way."""
        small = all(not x.is_floating_point() and not x.is_complex() and x.numel() <= _LARGEST_KNOWN for x in outputs)
        if small and outputs and all(x in self._values for x in inputs):
            known = lambda x: self._values.get(x, x) if isinstance(x, Tensor) else x  # noqa: E731
            here = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
            values = _tensors((func(*tree_map(known, args), **tree_map(known, here)),))
            for output, value in zip(outputs, values, strict=True):
                self._values[output] = value
            return
        for output in outputs:
            if output in self._values:
                del self._values[output]


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """Return the tensors in the arguments or results of an operator, each once."""
    unique: dict[int, Tensor] = {}
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, Tensor):
                unique[id(item)] = item
    return list(unique.values())


def _guess(scalar: Tensor) -> float | bool | int:
    """Return the value that an unknown scalar is taken to have: 1, and nothing is the case."""
    if scalar.dtype == torch.bool:
        return False
    return 1.0 if scalar.is_floating_point() else 1
