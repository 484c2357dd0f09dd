"""Save activation memory: recompute layers but for attention, or recompute MLPs tile by tile; :mod:`.offload` moves activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from hone.errors import ModelError

_SDPA_KINDS = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
    "fused_attention_overrideable",
)
ATTENTION_OPERATORS = frozenset(
    ("torch_attn::_varlen_attn", "hone::attend", *(f"aten::_scaled_dot_product_{kind}" for kind in _SDPA_KINDS)),
)
"""Operators that compute attention: the variable-length one of :mod:`hone.models.attention.varlen`, that of compiled layers, and those
of SDPA."""


def checkpointing_arguments(keeps: str) -> dict[str, Any]:
    """Return the arguments of ``torch.utils.checkpoint.checkpoint`` for a ``model.gradient_checkpointing_keeps``."""
    if keeps == "nothing":
        return {"use_reentrant": False}
    return {"use_reentrant": False, "context_fn": partial(create_selective_checkpoint_contexts, _keep_attention)}


def _keep_attention(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the policy that keeps the outputs of attention operators."""
    del context, args, kwargs
    kept = operator.name().partition(".")[0] in ATTENTION_OPERATORS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


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
