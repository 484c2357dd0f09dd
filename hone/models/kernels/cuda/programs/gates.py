"""Triton programs of SwiGLU: a program handles a block of one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def gate_forward(joint, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(joint + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint + row * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_backward(grad, joint, grad_joint, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    first = row * 2 * width + column
    gate = tl.load(joint + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(joint + first + width, mask=inside, other=0.0).to(tl.float32)
    outer = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    grad_gate = outer * up * share * (1.0 + gate * (1.0 - share))
    tl.store(grad_joint + first, grad_gate.to(grad_joint.dtype.element_ty), mask=inside)
    tl.store(grad_joint + first + width, (outer * gate * share).to(grad_joint.dtype.element_ty), mask=inside)


def forward(joint: Tensor) -> Tensor:
    joint = joint.contiguous()
    rows, width = joint.shape[0], joint.shape[1] // 2
    out = joint.new_empty(rows, width)
    gate_forward[(rows, triton.cdiv(width, BLOCK))](joint, out, width, BLOCK)
    return out


def backward(grad: Tensor, joint: Tensor) -> Tensor:
    joint = joint.contiguous()
    rows, width = grad.shape
    grad_joint = torch.empty_like(joint)
    gate_backward[(rows, triton.cdiv(width, BLOCK))](grad, joint, grad_joint, width, BLOCK)
    return grad_joint
