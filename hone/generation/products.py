"""Which library multiplies float32 matrices on the CPU.

torch hands them to MKL, which on processors that are not Intel's leaves about half their speed unused; oneDNN, which torch
carries too, does not. torch takes oneDNN only where it may round to bfloat16 inside. Most processors have no instruction for
that and compute in float32 all the same, which is tried once here: where the products are those of float32, oneDNN gets them.
It prepares and remembers something for every new shape; :mod:`hone.training.memory` says what follows from that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

_FLOAT32_ERROR = 1e-5
"""Relative; rounding to bfloat16 makes errors of 1e-3, float32 of 1e-6."""


@contextlib.contextmanager
def fast_float32_products(device: torch.device) -> Iterator[None]:
    """Within the block float32 products on the CPU go to oneDNN, if they are exact there. Elsewhere nothing changes."""
    if device.type != "cpu" or not onednn_is_exact():
        yield
        return
    with _onednn():
        yield


@cache
def onednn_is_exact() -> bool:
    """Whether oneDNN's float32 products on this processor have float32's errors, tried on the kinds of shapes in use."""
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), _onednn():
        for rows, inner, columns in ((4, 256, 512), (64, 256, 64), (512, 704, 256)):
            left = torch.randn(rows, inner, generator=generator)
            right = torch.randn(columns, inner, generator=generator)
            exact = left.double() @ right.double().t()
            for found in (left @ right.t(), (left[None] @ right.t()[None])[0], (right @ left.t()).t()):
                if float((found - exact).norm() / exact.norm()) > _FLOAT32_ERROR:
                    return False
    return True


@cache
def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether this torch has the operators that multiply with weights packed beforehand, for inference, and the processor the
    instructions for this dtype."""
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
