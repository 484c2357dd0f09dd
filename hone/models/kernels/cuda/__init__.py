"""Fused operators for CUDA, written in Triton, each with a reference in plain PyTorch as its kernel for the CPU.

:mod:`.norms`       residual addition with RMS norm
:mod:`.heads`       QK norm with RoPE
:mod:`.gates`       SwiGLU
:mod:`.matmuls`     products of bfloat16 matrices that are added up in float32
:mod:`.vocabulary`  the output layer with its softmax, without logits in memory
:mod:`.pages`       attention of decoded tokens over keys and values in pages; it has no gradient
:mod:`.programs`    the Triton programs; imported when a CUDA tensor arrives

An operator is registered with torch (``torch.ops.hone``) with its shapes on tensors without storage and its gradient. It computes in
float32 whatever the dtype of its inputs, and its arguments name the dtype of its results, so autocast changes nothing in it.
"""

from __future__ import annotations

import functools
import importlib.util

import torch

_FIRST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with bfloat16 (Ampere)."""


def available(device: torch.device) -> bool:
    """True if the operators run on ``device``; the meta device counts as a recent GPU."""
    if device.type == "meta":
        return True
    return device.type == "cuda" and _has_triton() and torch.cuda.get_device_capability(device) >= _FIRST_CAPABILITY


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
