"""The optimizer and the learning-rate schedule."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hone.config.model import OptimConfig
from hone.errors import ConfigError, did_you_mean
from hone.registry import imported

KEY = "optim.optimizer"


def build_optimizer(module: nn.Module, config: OptimConfig) -> Optimizer:
    """The optimizer over the trainable parameters; weight decay acts on matrices only (Loshchilov and Hutter 2019).

    Raises:
        ConfigError: no such optimizer, or it does not take an argument.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    cls = _optimizer_class(config.optimizer)
    try:
        return cls([group for group in groups if group["params"]], **_arguments(cls, config))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{config.optimizer} cannot be made: {error}",
            where=KEY,
            fix="change optim.override_optimizer_config, or take optim.optimizer=AdamW",
        ) from error


def _optimizer_class(name: str) -> type[Optimizer]:
    if ":" in name:
        cls = imported(name, KEY)
    else:
        cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        known = [
            n for n, found in vars(torch.optim).items() if isinstance(found, type) and issubclass(found, Optimizer)
        ]
        raise ConfigError(
            f"'{name}' is no optimizer of torch.optim, and no import path of one",
            where=KEY,
            fix=f"{did_you_mean(name, known)} One of your own is named my_module:MyOptimizer.",
        )
    return cls


def _arguments(cls: type[Optimizer], config: OptimConfig) -> dict[str, Any]:
    """What of the configuration the constructor takes; a fused kernel where there is one."""
    fused = cls in (torch.optim.Adam, torch.optim.AdamW)  # those whose kernel takes shards too
    offered = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    offered |= {"fused": True} if fused else {}
    taken = inspect.signature(cls).parameters
    return {name: value for name, value in offered.items() if name in taken} | dict(config.override_optimizer_config)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Learning rate of step ``step`` (0 is the first): linear warm-up, then constant or cosine to min_lr_ratio x lr."""
    warmup = config.lr_warmup_steps
    if warmup < 0:
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    floor = 1.0 if config.lr_scheduler_type == "constant" else config.min_lr_ratio
    if step < warmup:
        return config.lr * (step + 1) / warmup
    if floor == 1.0:
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    scale = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * scale
