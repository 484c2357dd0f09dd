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
import logging

import torch

log = logging.getLogger("hone.models.kernels")

_FIRST_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with bfloat16 (Ampere)."""


def available(device: torch.device) -> bool:
    """True if the operators run on ``device``; the meta device counts as a recent GPU. The first call tries a small one."""
    if device.type == "meta":
        return True
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _FIRST_CAPABILITY:
        return False
    return _has_triton() and _launches(device)


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def _launches(device: torch.device) -> bool:
    """Return whether a program can be compiled and launched; Triton needs a C compiler and Python's headers for its launcher."""
    from hone.models.kernels.cuda.gates import swiglu

    try:
        swiglu(torch.ones(1, 2, device=device))
    except Exception as error:  # noqa: BLE001 - Triton raises errors of many kinds
        log.warning("Hone's Triton programs do not run here, and slower operators of torch replace them: %s", error)
        return False
    return True
