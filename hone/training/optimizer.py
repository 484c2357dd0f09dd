"""The optimizer and the learning-rate schedule."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hone.config.model import OptimConfig
from hone.config.param_groups import ParamGroup, assign_groups, read_param_groups
from hone.errors import ConfigError, did_you_mean
from hone.registry import imported
from hone.training import eight_bits, muon
from hone.training.updates import Statistics, UpdateResult


class WeightAverage:
    """Average of parameters after each update: ``decay * average + (1 - decay) * weights``, from the initial weights on.

    Args:
        parameters: names and parameters, which may be shards; the average of a shard is sharded alike.

    Attributes:
        values: float32 averages by the name of the parameter.

    >>> weights = nn.Parameter(torch.zeros(1))
    >>> average = WeightAverage([("w", weights)], decay=0.75)
    >>> weights.data.fill_(4.0), average.update(), average.values["w"]
    (tensor([4.]), None, tensor([1.]))
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self._parameters = dict(parameters)
        self._averaged = get_ema_multi_avg_fn(decay)
        self.values: dict[str, Tensor] = {
            name: parameter.detach().clone(memory_format=torch.contiguous_format).float()
            for name, parameter in self._parameters.items()
        }

    def update(self) -> None:
        averages, weights = ([_local(t) for t in part.values()] for part in (self.values, self._parameters))
        self._averaged(averages, weights, 0)

    def move(self, device: torch.device) -> None:
        self.values = {name: value.to(device) for name, value in self.values.items()}


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


INITIAL, GROWTH_INTERVAL = 2.0**16, 2000
"""Those of ``torch.amp.GradScaler``, whose rule this is. Its own search for infinities is not needed: every update has the gradient's norm,
the same on all ranks."""


@dataclass
class LossScale:
    """The factor of the loss in the backward pass of float16 (Micikevicius et al. 2018, arXiv:1710.03740).

    It is a power of two, so that no gradient within range is rounded differently.

    >>> scale = LossScale()
    >>> scale.explains_overflow(), scale.update(finite=False), scale.value
    (True, None, 32768.0)
    """

    value: float = INITIAL
    streak: int = 0  # finite updates in succession

    def explains_overflow(self) -> bool:
        """Return whether a smaller scale may make the gradient finite."""
        return self.value > 1.0

    def update(self, *, finite: bool) -> None:
        """Halve after an overflow, to 1 at the least; double after ``GROWTH_INTERVAL`` finite updates in succession."""
        if not finite:
            self.value, self.streak = max(1.0, self.value / 2), 0
            return
        self.streak += 1
        if self.streak == GROWTH_INTERVAL:
            self.value, self.streak = self.value * 2, 0


KEY = "optim.optimizer"
LR_MULT = "lr_mult"  # key of a parameter group of every optimizer: the factor of its learning rate


class ScheduledOptimizer:
    """An optimizer over the trainable parameters of a module, stepped by the learning-rate schedule.

    Args:
        scaled: whether the loss is scaled, for a backward pass in float16.
        names: of the trained parameters of a model of which ``module`` is a part; None if it is all.

    Attributes:
        loss_scale: factor of the loss, or None. Gradients have it until :meth:`scale`.
    """

    def __init__(
        self,
        module: nn.Module,
        config: OptimConfig,
        total_steps: int,
        *,
        scaled: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        self.config, self.total_steps = config, total_steps
        self.inner = build_optimizer(module, config, names)
        self.loss_scale = LossScale() if scaled else None
        trained = list(trained_parameters(module))
        self.parameters = [parameter for _, parameter in trained]
        self.average = None if config.ema_decay is None else WeightAverage(trained, config.ema_decay)

    def begin(self) -> None:
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
        return learning_rate(self.config, step, self.total_steps)

    def step(self, step: int, grad_norm: float) -> bool:
        """Update the parameters at schedule position ``step`` and clear the gradients.

        ``grad_norm``: of the gradient; if it is not finite, the update is skipped. Returns whether the parameters were
        updated.
        """
        finite = math.isfinite(grad_norm)
        if finite:
            for group in self.inner.param_groups:
                rate = self.learning_rate(step) * group[LR_MULT]
                if isinstance(group["lr"], Tensor):  # of a compiled step, which reads it again
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self.inner.step()
            if self.average is not None:
                self.average.update()
        self.begin()
        if self.loss_scale is not None:
            self.loss_scale.update(finite=finite)
        return finite

    def update(self, step: int, grad_norm: float, statistics: list[Statistics]) -> UpdateResult:
        scale, overflow = None, False
        if self.loss_scale is not None:
            scale = self.loss_scale.value
            overflow = not math.isfinite(grad_norm) and self.loss_scale.explains_overflow()
        return UpdateResult(grad_norm, statistics, self.step(step, grad_norm), scale, overflow)

    def move_state(self, device: torch.device) -> None:
        if self.average is not None:
            self.average.move(device)
        for state in self.inner.state.values():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)


def build_optimizer(module: nn.Module, config: OptimConfig, names: Collection[str] | None = None) -> Optimizer:
    """Create the optimizer of the trainable parameters.

    Args:
        module: its parameters may be shards, or without storage.
        names: of the trained parameters of the whole model, if ``module`` is a part of it.

    Raises:
        ConfigError: the optimizer is unknown, or does not take an argument; or a parameter group has no parameters.
    """
    return create_optimizer(optimizer_groups(module, config, names), config)


def create_optimizer(groups: list[dict[str, Any]], config: OptimConfig) -> Optimizer:
    """Create the optimizer of torch's parameter groups; see :func:`build_optimizer`."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    cls = _optimizer_class(config.optimizer, parameters)
    try:
        return cls(groups, **_arguments(cls, config, kernels=not any(p.is_meta for p in parameters)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{config.optimizer} cannot be created: {error}",
            where=KEY,
            fix="change optim.override_optimizer_config, or set optim.optimizer=AdamW",
        ) from error


def optimizer_groups(
    module: nn.Module, config: OptimConfig, names: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Return torch's parameter groups; weight decay applies to matrices only (Loshchilov and Hutter 2019). Raises
    ConfigError: a group of the configuration is not valid, or has no parameters.
    """
    trained = dict(trained_parameters(module))
    settings = assign_groups(names or trained, read_param_groups(config.param_groups))
    matrices = muon.layer_matrices(module) if config.optimizer == muon.NAME else set()
    return group_parameters(trained, settings, config, matrices)


def group_parameters(
    trained: Mapping[str, nn.Parameter],
    settings: Mapping[str, ParamGroup],
    config: OptimConfig,
    matrices: Collection[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """Return torch's parameter groups of parameters with these settings.

    Args:
        settings: entries of ``param_groups`` by the name of their parameters.
        matrices: parameters that Muon orthogonalises.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, parameter in trained.items():
        setting = settings.get(name)
        decay = None if setting is None else setting.weight_decay
        if decay is None:
            decay = config.weight_decay if parameter.dim() >= 2 else 0.0
        group: dict[str, Any] = {LR_MULT: 1.0 if setting is None else setting.lr_mult, "weight_decay": decay}
        if matrices:
            group[muon.ORTHOGONAL] = parameter in matrices
        groups.setdefault(tuple(group.values()), {"params": [], **group})["params"].append(parameter)
    return list(groups.values())


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _optimizer_class(name: str, parameters: Iterable[nn.Parameter]) -> type[Optimizer]:
    if name == muon.NAME:
        return muon.Muon
    if name == eight_bits.NAME:
        return eight_bits.eight_bit_class(parameters)
    if ":" in name:
        cls = imported(name, KEY)
    else:
        cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)) or cls is Optimizer:
        known = [
            n for n, value in vars(torch.optim).items() if isinstance(value, type) and issubclass(value, Optimizer)
        ]
        raise ConfigError(
            f"'{name}' is not an optimizer of torch.optim, {eight_bits.NAME}, or the import path of an optimizer",
            where=KEY,
            fix=f"{did_you_mean(name, [*known, eight_bits.NAME])} For a custom class: my_module:MyOptimizer.",
        )
    return cls


def _arguments(cls: type[Optimizer], config: OptimConfig, *, kernels: bool) -> dict[str, Any]:
    """Return the constructor's arguments from the configuration; ``kernels``: with a fused kernel if there is one."""
    fused = cls in (torch.optim.Adam, torch.optim.AdamW, muon.Muon)  # their kernels support shards
    offered = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    offered |= {"fused": True} if fused and kernels else {}
    taken = inspect.signature(cls).parameters
    return {name: value for name, value in offered.items() if name in taken} | dict(config.override_optimizer_config)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then the shape of ``lr_scheduler_type``."""
    warmup = _steps(config.lr_warmup_steps, config.lr_warmup_steps_ratio, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    last, shape = total_steps - 1, config.lr_scheduler_type
    if shape == "constant":
        return config.lr
    begin = warmup
    if shape == "wsd":
        begin = last - _steps(config.lr_wsd_decay_steps, config.lr_wsd_decay_steps_ratio, total_steps - warmup)
        begin, shape = max(warmup, begin), config.lr_wsd_decay_style
    progress = min(1.0, max(0, step - begin) / max(1, last - begin))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * _SHAPES[shape](progress))


_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "minus_sqrt": lambda progress: 1 - math.sqrt(progress),  # Haegele et al. 2024, arXiv:2405.18392
    "exponential": lambda progress: 2 ** (1 - progress) - 1,  # Megatron's
}
"""Factors that fall from 1 to 0."""


def _steps(steps: int, ratio: float, total_steps: int) -> int:
    return steps if steps >= 0 else int(ratio * total_steps)
