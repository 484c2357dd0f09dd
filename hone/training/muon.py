"""Muon (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982): the momentum of each matrix, orthogonalised.

It updates the matrices of the layers. Embeddings, output layers, norms and biases have no such geometry and are updated by AdamW, in
the same optimizer. The step of a matrix is scaled to the size of AdamW's, so that both parts use one learning rate.

Of a sharded matrix each rank all-gathers the momentum and orthogonalises all of it: every layout computes the same step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer

from hone.config.limits import ORTHOGONALISED_NUMBERS
from hone.errors import ConfigError
from hone.models.devices import computes_bfloat16
from hone.models.loading import causal_lm, layers_of

NAME = "Muon"  # value of ``optim.optimizer``
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
        momentum, gradient = _local(state["momentum_buffer"]), _local(gradient)
        momentum.lerp_(gradient, 1 - self._momentum)
        direction = gradient.lerp(momentum, self._momentum) if self._nesterov else momentum
        step, local = self._orthogonalised(direction, parameter), _local(parameter)
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


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


_LR_FACTORS: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
}
