"""Residual addition and RMS norm (Zhang and Sennrich 2019) in one pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import wide
from hone.models.kernels.cuda.programs import launched_on_cuda


@torch.library.custom_op("hone::add_rms_norm", mutates_args=(), device_types="cpu")
def _add_rms_norm(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``residual + delta`` (empty without delta), its norm in ``dtype``, and the inverse root mean squares ``[N]``."""
    total = wide(residual) if delta is None else wide(residual) + wide(delta)
    total = total.to(residual.dtype)
    scale = torch.rsqrt(wide(total).square().mean(-1) + epsilon)
    normed = (wide(total) * scale[:, None] * wide(weight)).to(dtype)
    return residual.new_empty(0) if delta is None else total, normed, scale


@_add_rms_norm.register_fake
def _shapes(
    residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    del weight, epsilon
    total = residual.new_empty(0) if delta is None else torch.empty_like(residual)
    scale = residual.new_empty(len(residual), dtype=torch.promote_types(residual.dtype, torch.float32))
    return total, torch.empty_like(residual, dtype=dtype), scale


launched_on_cuda(_add_rms_norm, "norms", "forward")


@torch.library.custom_op("hone::add_rms_norm_backward", mutates_args=(), device_types="cpu")
def _add_rms_norm_backward(
    grad_total: Tensor | None,
    grad_normed: Tensor,
    total: Tensor,
    weight: Tensor,
    scale: Tensor,
    delta_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of the residual, of delta (the same numbers in its dtype, or empty), and of the weight."""
    normed = wide(total) * scale[:, None]
    scaled = wide(grad_normed) * wide(weight)
    grad = scale[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if grad_total is not None:
        grad = grad + wide(grad_total)
    grad_weight = (wide(grad_normed) * normed).sum(0).to(weight.dtype)
    grad_delta = grad.new_empty(0) if delta_dtype is None else grad.to(delta_dtype, copy=True)
    return grad.to(total.dtype), grad_delta, grad_weight


@_add_rms_norm_backward.register_fake
def _backward_shapes(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, total, weight, _, delta_dtype = inputs
    grad_delta = total.new_empty(0) if delta_dtype is None else torch.empty_like(total, dtype=delta_dtype)
    return torch.empty_like(total), grad_delta, torch.empty_like(weight)


launched_on_cuda(_add_rms_norm_backward, "norms", "backward")


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    residual, delta, weight, _, _ = inputs
    total, _, scale = output
    ctx.save_for_backward(residual if delta is None else total, weight, scale)
    ctx.delta_dtype = None if delta is None else delta.dtype
    ctx.mark_non_differentiable(scale)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_total: Tensor | None, grad_normed: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    total, weight, scale = ctx.saved_tensors
    if grad_normed is None:  # nothing uses the norm
        grad_delta = None if ctx.delta_dtype is None or grad_total is None else grad_total.to(ctx.delta_dtype)
        return grad_total, grad_delta, None, None, None
    if ctx.delta_dtype is None:
        grad_total = None
    grads = torch.ops.hone.add_rms_norm_backward(
        None if grad_total is None else grad_total.contiguous(),
        grad_normed.contiguous(),
        total,
        weight,
        scale,
        ctx.delta_dtype,
    )
    return grads[0], None if ctx.delta_dtype is None else grads[1], grads[2], None, None


_add_rms_norm.register_autograd(_backward, setup_context=_setup_context)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Return ``weight * states / sqrt(mean(states**2) + epsilon)`` over the last dimension of ``states [N, H]``, in ``dtype``."""
    return torch.ops.hone.add_rms_norm(states, None, weight, epsilon, dtype)[1]


def add_rms_norm(
    residual: Tensor, delta: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return ``residual + delta`` in the dtype of the residual, and its norm in ``dtype``; all are ``[N, H]``."""
    total, normed, _ = torch.ops.hone.add_rms_norm(residual, delta, weight, epsilon, dtype)
    return total, normed
