"""Projections in the compute dtype whose weight gradients are added up in float32 inside the matmul."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import wide


@torch.library.custom_op("hone::matmul_wide", mutates_args=(), device_types="cpu")
def _matmul_wide(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left [m, k]`` times ``right [k, n]`` of narrow dtypes in float32."""
    return wide(left) @ wide(right)


@_matmul_wide.register_fake
def _shape(left: Tensor, right: Tensor) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.promote_types(left.dtype, torch.float32))


@_matmul_wide.register_kernel("cuda")
def _on_cuda(left: Tensor, right: Tensor) -> Tensor:
    return left @ right if left.dtype == torch.float32 else torch.mm(left, right, out_dtype=torch.float32)


@torch.library.custom_op("hone::add_matmul_wide", mutates_args=("total",), device_types="cpu")
def _add_matmul_wide(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left [m, k]`` times ``right [k, n]`` of narrow dtypes to ``total [m, n]`` in float32."""
    total.addmm_(wide(left), wide(right))


@_add_matmul_wide.register_fake
def _changes_total(total: Tensor, left: Tensor, right: Tensor) -> None:
    del total, left, right


@_add_matmul_wide.register_kernel("cuda")
def _add_on_cuda(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


class _Kept(torch.autograd.Function):
    """Keeps the operands of a matmul before it runs; the result, which is empty, leads back to them.

    Gradient checkpointing recomputes a layer until all that was kept is there. A matmul that keeps its operands itself, when it has
    run, would be recomputed for nothing at the end of a layer.
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, joint: Tensor, anchor: Tensor) -> Tensor:
        del anchor  # requires a gradient where the states do not
        ctx.save_for_backward(states, joint)
        return joint.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        del ctx, grads
        return None, None, None


class _JointLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, joint: Tensor, kept: Tensor, bias: Tensor | None, *weights: Tensor) -> Tensor:
        ctx.kept = kept.grad_fn
        ctx.parts = [(len(weight), weight.dtype) for weight in weights]
        ctx.bias_dtype = None if bias is None else bias.dtype
        return torch.nn.functional.linear(states, joint, None if bias is None else bias.to(joint.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        states, joint = ctx.kept.saved_tensors
        grad = grads[0].contiguous()
        grad_states = grad @ joint if ctx.needs_input_grad[0] else None
        grad_bias = None if ctx.bias_dtype is None else wide(grad).sum(0).to(ctx.bias_dtype)
        grad_weights: list[Tensor | None] = [None] * len(ctx.parts)
        if any(ctx.needs_input_grad[4:]):
            whole = torch.ops.hone.matmul_wide(grad.t(), states)
            parts = whole.split([rows for rows, _ in ctx.parts])
            grad_weights = [part.to(dtype) for part, (_, dtype) in zip(parts, ctx.parts, strict=True)]
        return grad_states, None, None, grad_bias, *grad_weights


@torch.no_grad()
def _joint_weight(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate weights in the compute dtype, the cast and the concatenation in one pass."""
    if len(weights) == 1:
        return weights[0].detach().to(dtype)
    joint = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype)
    for weight, part in zip(weights, joint.split([len(weight) for weight in weights]), strict=True):
        part.copy_(weight)
    return joint


def joint_linear(states: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
    """Return the outputs ``[N, sum of rows]`` of projections that share their input, by one matmul in the dtype of ``states``.

    Gradients of weights are float32 before they get the weights' dtype.
    """
    bias = None if not biases else torch.cat(list(biases)) if len(biases) > 1 else biases[0]
    with torch.autocast(states.device.type, enabled=False):
        joint = _joint_weight(weights, states.dtype)
        kept = _Kept.apply(states, joint, weights[0])
        return _JointLinear.apply(states, joint, kept, bias, *weights)  # type: ignore[return-value]
