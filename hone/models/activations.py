"""Save activation memory: keep activations on the host until the backward pass, or recompute MLPs tile by tile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hone.errors import ModelError

SMALLEST = 1 << 16
"""Size in numbers of the smallest tensor that is moved."""


@contextlib.contextmanager
def activations_on_host(device: torch.device, enabled: bool) -> Iterator[None]:
    """Move tensors that autograd saves within the block to host memory until the backward pass needs them.

    Parameters and small tensors stay on the device. On the CPU nothing changes.
    """
    if not enabled or device.type == "cpu":
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(_to_host, _to_device):
        yield


def _to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    base = tensor if tensor._base is None else tensor._base
    if isinstance(base, nn.Parameter) or tensor.numel() < SMALLEST or tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)


def _to_device(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    device, host = kept
    return host.to(device, non_blocking=True)


def tile_mlps(layers: list[nn.Module], tiles: int) -> None:
    """Run the MLP of every layer on ``tiles`` slices of the tokens, each recomputed in the backward pass.

    The inner activations of an MLP, the widest of a model, then exist for one slice at a time.

    Raises:
        ModelError: no layer has a plain feed-forward part.
    """
    plain = [mlp for layer in layers if isinstance(mlp := getattr(layer, "mlp", None), nn.Module) and _is_plain(mlp)]
    if not plain:
        raise ModelError(
            "tiled_mlp is on, and no layer of the model has a plain feed-forward part named mlp",
            why="experts get their tokens from a router, which looks at all of them",
            where="model.tiled_mlp.enabled",
            fix="model.tiled_mlp.enabled=false model.enable_gradient_checkpointing=true",
        )
    for mlp in plain:
        mlp.forward = _tiled(mlp.forward, tiles)


def _is_plain(mlp: nn.Module) -> bool:
    return hasattr(mlp, "down_proj") and not hasattr(mlp, "experts")


def _tiled(forward: Callable[..., Any], tiles: int) -> Callable[[Tensor], Tensor]:
    def in_tiles(hidden: Tensor) -> Tensor:
        parts = hidden.tensor_split(tiles, dim=-2)
        parts = [part for part in parts if part.shape[-2]]
        if not torch.is_grad_enabled():
            return torch.cat([forward(part) for part in parts], -2)
        return torch.cat([checkpoint(forward, part, use_reentrant=False) for part in parts], -2)

    return in_tiles
