"""Triton programs of the residual addition with RMS norm: a program holds whole rows."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hone.models.kernels.cuda.programs import summing_programs


@triton.jit
def norm_forward(
    residual, delta, weight, total, normed, scale, width, epsilon, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    states = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        states += tl.load(delta + place, mask=inside, other=0.0).to(tl.float32)
        rounded = states.to(total.dtype.element_ty)
        tl.store(total + place, rounded, mask=inside)
        states = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(states * states, 0) / width + epsilon)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, (states * inverse * factor).to(normed.dtype.element_ty), mask=inside)
    tl.store(scale + row, inverse)


@triton.jit
def norm_backward(
    grad_total,
    grad_normed,
    total,
    weight,
    scale,
    grad_residual,
    grad_delta,
    grad_weights,
    rows,
    width,
    HAS_TOTAL: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)
    inside = column < width
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    grad_weight = tl.zeros((BLOCK,), tl.float32)
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        place = tl.cast(index, tl.int64) * width + column
        inverse = tl.load(scale + index)
        states = tl.load(total + place, mask=inside, other=0.0).to(tl.float32) * inverse
        grad = tl.load(grad_normed + place, mask=inside, other=0.0).to(tl.float32)
        grad_weight += grad * states
        grad *= factor
        grad = inverse * (grad - states * (tl.sum(grad * states, 0) / width))
        if HAS_TOTAL:
            grad += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_residual + place, grad.to(grad_residual.dtype.element_ty), mask=inside)
        if HAS_DELTA:
            tl.store(grad_delta + place, grad.to(grad_delta.dtype.element_ty), mask=inside)
    tl.store(grad_weights + tl.program_id(0).to(tl.int64) * width + column, grad_weight, mask=inside)


def forward(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    residual = residual.contiguous()
    rows, width = residual.shape
    total = residual.new_empty(0) if delta is None else torch.empty_like(residual)
    normed, scale = torch.empty_like(residual, dtype=dtype), residual.new_empty(rows, dtype=torch.float32)
    added = residual if delta is None else delta.contiguous()
    norm_forward[(rows,)](
        residual, added, weight, total, normed, scale, width, epsilon, delta is not None, **_shape(width)
    )
    return total, normed, scale


def backward(
    grad_total: Tensor | None,
    grad_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    delta_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    total = total.contiguous()
    rows, width = total.shape
    programs = summing_programs(total.device, rows)
    grad_residual = torch.empty_like(total)
    grad_delta = total.new_empty(0) if delta_dtype is None else torch.empty_like(total, dtype=delta_dtype)
    grad_weights = total.new_empty(programs, width, dtype=torch.float32)
    norm_backward[(programs,)](
        total if grad_total is None else grad_total,
        grad_normed,
        total,
        weight,
        scale,
        grad_residual,
        grad_delta,
        grad_weights,
        rows,
        width,
        grad_total is not None,
        delta_dtype is not None,
        **_shape(width),
    )
    return grad_residual, grad_delta, grad_weights.sum(0).to(weight.dtype)


def _shape(width: int) -> dict[str, Any]:
    """Return the block that holds a row, and warps for 16 numbers a thread."""
    block = triton.next_power_of_2(width)
    return {"BLOCK": block, "num_warps": min(16, max(4, block // 512))}
