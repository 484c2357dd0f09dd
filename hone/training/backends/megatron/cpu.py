"""Let Megatron-core compute on a CPU: where it names the CUDA device, it gets the CPU.

Megatron allocates on ``torch.cuda.current_device()`` and ``device="cuda"`` and compares the names of tensor types. The names are
replaced only within :func:`on_device`, and only on a machine without a GPU in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_tensor_type = Tensor.type


@contextlib.contextmanager
def on_device(device: torch.device) -> Iterator[None]:
    """Run code of Megatron within the block on ``device``; on a GPU nothing is changed."""
    if device.type != "cpu":
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, value in _CUDA.items():
            stack.enter_context(patch.object(torch.cuda, name, value))
        stack.enter_context(patch.object(Tensor, "type", _cuda_type))
        stack.enter_context(patch.object(Tensor, "cuda", _stay))
        stack.enter_context(_CudaMeansCpu())
        yield


class _CudaMeansCpu(TorchFunctionMode):
    """Replace ``device="cuda"`` in the arguments of factory functions."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if (device := kwargs.get("device")) is not None and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return func(*args, **kwargs)


def _cuda_type(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Return the type of a tensor as if it were on a GPU (``torch.cuda.FloatTensor``); with arguments, cast."""
    if args or kwargs:
        return _tensor_type(tensor, *args, **kwargs)
    name = _tensor_type(tensor)  # within a function mode it comes from this function
    return name if ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)


def _stay(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _nothing(*args: Any, **kwargs: Any) -> None:
    return


_CUDA: dict[str, Any] = {"current_device": lambda: _CPU, "synchronize": _nothing, "empty_cache": _nothing}
