"""Norm and clipping of a sharded gradient."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PIECE = 1 << 24  # numbers of a gradient whose squares are summed at a time: 128 MiB in float64


def clip_gradients(
    parameters: Iterable[nn.Parameter],
    largest: float,
    device: torch.device,
    *,
    stages: int = 1,
    shared: nn.Parameter | None = None,
) -> float:
    """Scale the gradient down to a norm of at most ``largest``. Collective over all ranks.

    Args:
        stages: pipeline stages, each with other parameters.
        shared: parameter that two stages have.

    Returns:
        The norm before clipping, the same on all ranks.
    """
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(grads, device, stages=stages, shared=None if shared is None else shared.grad)
    factor = largest / (norm + 1e-6)  # torch's, as in the other backends: a norm just below the limit is scaled, too
    if math.isfinite(norm) and factor < 1:
        for grad in grads:
            _local(grad).mul_(factor)
    return norm


def gradient_norm(grads: list[Tensor], device: torch.device, *, stages: int = 1, shared: Tensor | None = None) -> float:
    """Return the norm of the whole gradient, the same on all ranks. Replicas of a shard count once.

    Squares are summed in float64, a piece of a gradient at a time, and the host waits once, at the end. For ``stages`` and
    ``shared`` see :func:`clip_gradients`.
    """
    ranks = dist.get_world_size() // stages
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        shards = 0.5 if grad is shared else 1.0
        if isinstance(grad, DTensor):
            sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
            shards *= math.prod(size for placement, size in sizes if not placement.is_replicate())
        squares += sum_of_squares(_local(grad)).to(device) * (shards / ranks)
    dist.all_reduce(squares)
    return math.sqrt(float(squares))


def sum_of_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares in float64 on the tensor's device, with copies of at most :data:`PIECE` numbers."""
    pieces = tensor.detach().reshape(-1).split(PIECE)
    return torch.stack([piece.double().square().sum() for piece in pieces]).sum()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
