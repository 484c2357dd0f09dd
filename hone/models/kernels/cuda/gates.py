"""SwiGLU (Shazeer 2020) over the joint output of both projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import wide
from hone.models.kernels.cuda.programs import launched_on_cuda


@torch.library.custom_op("hone::swiglu", mutates_args=(), device_types="cpu")
def _swiglu(joint: Tensor) -> Tensor:
    gate, up = wide(joint).chunk(2, -1)
    return (gate * gate.sigmoid() * up).to(joint.dtype)


@_swiglu.register_fake
def _shape(joint: Tensor) -> Tensor:
    return joint.new_empty(joint.shape[0], joint.shape[1] // 2)


launched_on_cuda(_swiglu, "gates", "forward")


@torch.library.custom_op("hone::swiglu_backward", mutates_args=(), device_types="cpu")
def _swiglu_backward(grad: Tensor, joint: Tensor) -> Tensor:
    gate, up = wide(joint).chunk(2, -1)
    share, outer = gate.sigmoid(), wide(grad)
    grad_gate = outer * up * share * (1.0 + gate * (1.0 - share))
    return torch.cat([grad_gate, outer * gate * share], -1).to(joint.dtype)


@_swiglu_backward.register_fake
def _backward_shape(grad: Tensor, joint: Tensor) -> Tensor:
    del grad
    return torch.empty_like(joint)


launched_on_cuda(_swiglu_backward, "gates", "backward")


def _setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return torch.ops.hone.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


_swiglu.register_autograd(_backward, setup_context=_setup_context)


def swiglu(joint: Tensor) -> Tensor:
    """Return ``silu(gate) * up [N, I]`` of ``joint [N, 2 I]``, which holds the gate before the other projection."""
    return torch.ops.hone.swiglu(joint)
