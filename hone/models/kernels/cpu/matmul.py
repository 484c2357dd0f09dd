"""Select the library for float32 matmuls on the CPU: oneDNN where it is exact, else torch's default, MKL.

On processors that are not Intel's, MKL reaches about half the speed of oneDNN. torch uses oneDNN for float32 only if it may
round to bfloat16 inside. Most processors have no instruction for that, so oneDNN computes in float32 anyway. A trial at first use
decides: if oneDNN's errors are those of float32, it is used. oneDNN caches a primitive for each new shape, which affects the heap
(:mod:`hone.models.kernels.cpu.memory`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

_FLOAT32_ERROR = 1e-5
"""Largest relative error that counts as float32. Rounding to bfloat16 causes 1e-3, float32 about 1e-6."""


@contextlib.contextmanager
def fast_float32_matmuls(device: torch.device) -> Iterator[None]:
    """Use oneDNN for float32 matmuls on the CPU within the block, if it is exact. On other devices nothing changes."""
    if device.type != "cpu" or not onednn_is_exact():
        yield
        return
    with _onednn():
        yield


@cache
def onednn_is_exact() -> bool:
    """True if oneDNN's float32 matmuls have float32 errors on this processor, tried on typical shapes."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), _onednn():
        for rows, inner, columns in ((4, 256, 512), (64, 256, 64), (512, 704, 256)):
            left = torch.randn(rows, inner, generator=generator)
            right = torch.randn(columns, inner, generator=generator)
            exact = left.double() @ right.double().t()
            for result in (left @ right.t(), (left[None] @ right.t()[None])[0], (right @ left.t()).t()):
                if float((result - exact).norm() / exact.norm()) > _FLOAT32_ERROR:
                    return False
    return True


@cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """True if matmuls with prepacked weights are available for this dtype: operators in torch, instructions in the processor."""
    names = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in names):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@contextlib.contextmanager
def _onednn() -> Iterator[None]:
    settings: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009  added to the module at run time
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before
