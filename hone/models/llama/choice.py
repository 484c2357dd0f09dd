"""The forward pass with which a model generates."""

from __future__ import annotations

import torch
from torch import nn

from hone.models.llama.cuda import FusedDecodeForward, supports_training
from hone.models.llama.decode import DecodeForward
from hone.models.llama.spec import supports
from hone.models.module_forward import Forward, ModuleForward


def generation_forward(causal: nn.Module, *, dtype: torch.dtype) -> Forward:
    """Return the fastest forward pass that computes ``causal`` with matmuls in ``dtype``."""
    if supports_training(causal):
        return FusedDecodeForward(causal, dtype=dtype)
    return DecodeForward(causal, dtype=dtype) if supports(causal) else ModuleForward(causal, dtype=dtype)
