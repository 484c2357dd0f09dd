"""The optimizer and the learning-rate schedule."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hone.config.model import OptimConfig
from hone.errors import ConfigError, did_you_mean
from hone.registry import imported
from hone.training.eight_bits import NAME, eight_bit_class
from hone.training.loss_scale import LossScale
from hone.training.updates import Statistics, UpdateResult

KEY = "optim.optimizer"


class ScheduledOptimizer:
    """An optimizer over the trainable parameters of a module, stepped by the learning-rate schedule.

    Args:
        module: its parameters may be shards.
        config: optimizer settings.
        total_steps: horizon of the schedule.
        scaled: whether the loss is scaled, for a backward pass in float16.

    Attributes:
        inner: the optimizer of torch.
        parameters: the trainable parameters, in the module's order.
        loss_scale: factor of the loss, or None. Gradients have it until :meth:`scale`.
    """

    def __init__(self, module: nn.Module, config: OptimConfig, total_steps: int, *, scaled: bool = False) -> None:
        self.config, self.total_steps = config, total_steps
        self.inner = build_optimizer(module, config)
        self.loss_scale = LossScale() if scaled else None
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def begin(self) -> None:
        """Clear the gradients."""
        self.inner.zero_grad(set_to_none=True)

    def scale(self, factor: float) -> None:
        """Multiply the gradients by a factor, and divide them by the scale of the loss."""
        if self.loss_scale is not None:
            factor /= self.loss_scale.value
        if factor != 1.0:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of schedule position ``step``."""
        return learning_rate(self.config, step, self.total_steps)

    def step(self, step: int, grad_norm: float) -> bool:
        """Update the parameters at schedule position ``step`` and clear the gradients.

        Args:
            grad_norm: of the gradient; if it is not finite, the update is skipped.

        Returns:
            Whether the parameters were updated.
        """
        finite = math.isfinite(grad_norm)
        if finite:
            for group in self.inner.param_groups:
                if isinstance(group["lr"], Tensor):  # of a compiled step, which reads it again
                    group["lr"].fill_(self.learning_rate(step))
                else:
                    group["lr"] = self.learning_rate(step)
            self.inner.step()
        self.begin()
        if self.loss_scale is not None:
            self.loss_scale.update(finite=finite)
        return finite

    def update(self, step: int, grad_norm: float, statistics: list[Statistics]) -> UpdateResult:
        """Call :meth:`step` and return the result of the update with the statistics of its micro-batches."""
        scale, overflow = None, False
        if self.loss_scale is not None:
            scale = self.loss_scale.value
            overflow = not math.isfinite(grad_norm) and self.loss_scale.explains_overflow()
        return UpdateResult(grad_norm, statistics, self.step(step, grad_norm), scale, overflow)

    def move_state(self, device: torch.device) -> None:
        """Move the optimizer's state to a device."""
        for state in self.inner.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)


def build_optimizer(module: nn.Module, config: OptimConfig) -> Optimizer:
    """Create the optimizer of the trainable parameters; weight decay applies to matrices only (Loshchilov and Hutter 2019).

    Raises:
        ConfigError: the optimizer is unknown, or does not take an argument.
    """
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.dim() < 2], "weight_decay": 0.0},
    ]
    cls = eight_bit_class(trainable) if config.optimizer == NAME else _optimizer_class(config.optimizer)
    try:
        return cls([group for group in groups if group["params"]], **_arguments(cls, config))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{config.optimizer} cannot be created: {error}",
            where=KEY,
            fix="change optim.override_optimizer_config, or set optim.optimizer=AdamW",
        ) from error


def _optimizer_class(name: str) -> type[Optimizer]:
    if ":" in name:
        cls = imported(name, KEY)
    else:
        cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        known = [
            n for n, value in vars(torch.optim).items() if isinstance(value, type) and issubclass(value, Optimizer)
        ]
        raise ConfigError(
            f"'{name}' is not an optimizer of torch.optim, {NAME}, or the import path of an optimizer",
            where=KEY,
            fix=f"{did_you_mean(name, [*known, NAME])} For a custom class: my_module:MyOptimizer.",
        )
    return cls


def _arguments(cls: type[Optimizer], config: OptimConfig) -> dict[str, Any]:
    """Return the constructor's arguments from the configuration, with a fused kernel if there is one."""
    fused = cls in (torch.optim.Adam, torch.optim.AdamW)  # their kernels support shards
    offered = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    offered |= {"fused": True} if fused else {}
    taken = inspect.signature(cls).parameters
    return {name: value for name, value in offered.items() if name in taken} | dict(config.override_optimizer_config)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then constant or cosine to min_lr_ratio x lr."""
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
