"""The optimizer and the learning-rate schedule.

Muon (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982) orthogonalises the momentum of each matrix. It updates the matrices of the
layers; embeddings, output layers, norms and biases have no such geometry and are updated by AdamW, in the same optimizer. The step of
a matrix is scaled to the size of AdamW's, so that both parts use one learning rate. Of a sharded matrix each rank all-gathers the
momentum and orthogonalises all of it: every layout computes the same step.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import get_ema_multi_avg_fn

from hone.config.limits import ORTHOGONALISED_NUMBERS
from hone.config.model import OptimConfig
from hone.config.param_groups import ParamGroup, assign_groups, read_param_groups
from hone.errors import ConfigError, did_you_mean
from hone.models.devices import computes_bfloat16
from hone.models.loading import causal_lm, layers_of
from hone.registry import imported
from hone.training import eight_bits
from hone.training.objectives import Statistics, UpdateResult

MUON = "Muon"  # value of ``optim.optimizer``
ORTHOGONAL = "orthogonal"  # key of a parameter group: whether its parameters are matrices for Muon
_EPS = 1e-7


def layer_matrices(model: nn.Module) -> set[nn.Parameter]:
    """Return the trained matrices of the layers, and the stacks ``[experts, rows, columns]`` of experts modules. Raises
    ConfigError: there is none.
    """
    modules = [module for layer in layers_of(causal_lm(model)) for module in layer.modules()]
    matrices = {
        parameter
        for module in modules
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.requires_grad
        and not name.endswith("bias")
        and parameter.dim() == (3 if "expert" in type(module).__name__.lower() and _is_stack(module) else 2)
    }
    if not matrices:
        raise ConfigError(
            f"{type(causal_lm(model)).__name__} has no trained matrices in its layers",
            why="Muon updates these",
            where="optim.optimizer",
            fix="optim.optimizer=AdamW",
        )
    return matrices


def _is_stack(module: nn.Module) -> bool:
    return any(parameter.dim() == 3 for parameter in module.parameters(recurse=False))


class Muon(Optimizer):
    """Muon for parameter groups with ``orthogonal=True``, AdamW for the others.

    Args:
        params: parameter groups; with Muon each parameter is a matrix ``[rows, columns]`` or a stack ``[n, rows, columns]``.
        adjust_lr_fn: factor of the step of a matrix with A rows and B columns: ``match_rms_adamw``, 0.2 x sqrt(max(A, B)), the
            size of AdamW's steps; or ``original``, sqrt(max(1, A / B)).
    """

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        adjust_lr_fn: str = "match_rms_adamw",
        fused: bool = False,
    ) -> None:
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum={momentum} is not between 0 and 1")
        if not 0 < ns_steps < 100:
            raise ValueError(f"ns_steps={ns_steps} is not between 1 and 99")
        if adjust_lr_fn not in _LR_FACTORS:
            raise ValueError(f"adjust_lr_fn={adjust_lr_fn} is not one of {', '.join(_LR_FACTORS)}")
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, ORTHOGONAL: True})
        self._momentum, self._nesterov, self._steps = momentum, nesterov, ns_steps
        a, b, c = ns_coefficients
        self._coefficients, self._lr_factor = (a, b, c), _LR_FACTORS[adjust_lr_fn]
        others = [group for group in self.param_groups if not group[ORTHOGONAL]]
        self._adamw = AdamW(others, betas=betas, eps=eps, fused=fused) if others else None
        if self._adamw is not None:  # one state, and the same groups, for schedules and checkpoints
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters. Collective if they are shards."""
        if closure is not None:
            raise RuntimeError("Muon takes no closure")
        if self._adamw is not None:
            self._adamw.step()
        for group in self.param_groups:
            if group[ORTHOGONAL]:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, lr: float, weight_decay: float) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        momentum, gradient = _shard(state["momentum_buffer"]), _shard(gradient)
        momentum.lerp_(gradient, 1 - self._momentum)
        direction = gradient.lerp(momentum, self._momentum) if self._nesterov else momentum
        step, local = self._orthogonalised(direction, parameter), _shard(parameter)
        local.mul_(1 - lr * weight_decay)
        local.add_(step.to(local), alpha=-lr * self._lr_factor(*parameter.shape[-2:]))

    def _orthogonalised(self, local: Tensor, parameter: Tensor) -> Tensor:
        """Return this rank's part of the orthogonalised direction, of which ``local`` is its part."""
        if not isinstance(parameter, DTensor) or _has_whole_matrices(parameter):
            return orthogonalised(local, self._coefficients, self._steps)
        mesh = parameter.device_mesh
        divided = DTensor.from_local(
            local.to(mesh.device_type),
            mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
        whole = orthogonalised(divided.full_tensor(), self._coefficients, self._steps)
        replicated = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return replicated.redistribute(placements=parameter.placements).to_local()


def orthogonalised(matrices: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Return float32 matrices of the same singular vectors, with singular values near 1, by Newton-Schulz iterations.

    Computed in bfloat16 where the device has it, else in float32.

    Args:
        matrices: ``[rows, columns]`` or ``[n, rows, columns]``.
        coefficients: a, b, c of an iteration ``X <- a X + (b G + c G^2) X`` with ``G = X X^T``.
    """
    if matrices.dim() == 2:
        return _newton_schulz(matrices[None], coefficients, steps)[0]
    together = max(1, ORTHOGONALISED_NUMBERS // (matrices.shape[1] * matrices.shape[2]))
    return torch.cat([_newton_schulz(part, coefficients, steps) for part in matrices.split(together)])


def _newton_schulz(matrices: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    a, b, c = coefficients
    x = matrices.to(torch.bfloat16 if computes_bfloat16(matrices.device) else torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


def _has_whole_matrices(parameter: DTensor) -> bool:
    """Return whether each rank has whole matrices of a stack, which is divided by its first axis alone."""
    return all(p.is_replicate() or (p.is_shard(0) and parameter.dim() == 3) for p in parameter.placements)


def _shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_LR_FACTORS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}


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
    matrices = layer_matrices(module) if config.optimizer == MUON else set()
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
            group[ORTHOGONAL] = parameter in matrices
        groups.setdefault(tuple(group.values()), {"params": [], **group})["params"].append(parameter)
    return list(groups.values())


def trained_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad)


def _optimizer_class(name: str, parameters: Iterable[nn.Parameter]) -> type[Optimizer]:
    if name == MUON:
        return Muon
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
    fused = cls in (torch.optim.Adam, torch.optim.AdamW, Muon)  # their kernels support shards
    offered = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    offered |= {"fused": True} if fused and kernels else {}
    taken = inspect.signature(cls).parameters
    return {name: value for name, value in offered.items() if name in taken} | dict(config.override_optimizer_config)


def learning_rate(config: OptimConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of a step (from 0): linear warm-up, then the shape of ``lr_scheduler_type``.

    The shape ends one step after the last, as in Transformers and verl: with ``min_lr_ratio=0`` no update has a rate of 0.
    """
    warmup = _steps(config.lr_warmup_steps, config.lr_warmup_steps_ratio, total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    shape = config.lr_scheduler_type
    if shape == "constant":
        return config.lr
    begin = warmup
    if shape == "wsd":
        begin = total_steps - _steps(config.lr_wsd_decay_steps, config.lr_wsd_decay_steps_ratio, total_steps - warmup)
        begin, shape = max(warmup, begin), config.lr_wsd_decay_style
    progress = min(1.0, max(0, step - begin) / max(1, total_steps - begin))
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
