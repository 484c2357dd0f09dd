"""Loss of the critic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import aggregate_loss, masked_mean, where_mask, wide


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor,
    response_mask: Tensor,
    *,
    cliprange_value: float = 0.5,
    loss_agg_mode: str = "token-mean",
    **counts: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error against the returns, pessimistic beyond ``old_values +- cliprange_value``.

    ``0.5 max((v - R)^2, (clip(v, v_old - c, v_old + c) - R)^2)``, as in the published PPO code (baselines' ppo2).

    Predictions and targets are ``[B, T]``. Metrics ``critic/vf_clipfrac`` and ``critic/vpred_mean`` are means over the mask.
    ``loss_agg_mode`` and ``counts`` are those of :func:`~hone.algorithms.masked.aggregate_loss`.
    """
    new, target, old = (wide(where_mask(x, response_mask)) for x in (values, returns.detach(), old_values.detach()))
    near = torch.maximum(torch.minimum(new, old + cliprange_value), old - cliprange_value)
    free, clipped = (new - target).square(), (near - target).square()
    loss = aggregate_loss(0.5 * torch.maximum(free, clipped), response_mask, loss_agg_mode, **counts)
    with torch.no_grad():
        metrics = {
            "critic/vf_clipfrac": masked_mean((clipped > free).to(new.dtype), response_mask),
            "critic/vpred_mean": masked_mean(new, response_mask),
        }
    return loss, metrics
