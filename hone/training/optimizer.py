"""AdamW and the learning-rate schedule."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW

from hone.config.model import OptimConfig


def build_optimizer(module: nn.Module, config: OptimConfig) -> AdamW:
    """AdamW over the trainable parameters; weight decay acts on matrices only (Loshchilov and Hutter 2019)."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return AdamW([group for group in groups if group["params"]], lr=config.lr, betas=betas, eps=config.eps, fused=True)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of step ``step`` (0 is the first): linear warm-up, then constant or cosine to min_lr_ratio x lr."""
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    scale = config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * scale
