"""Sums and means over the positions that a mask selects, and the aggregation of a loss that does not depend on micro-batches and ranks.

Values outside the mask may be NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hone.errors import ConfigError, did_you_mean


def wide(values: Tensor) -> Tensor:
    """Return ``values`` in float32 or better, so that sums and exponentials of bfloat16 keep their precision."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def where_mask(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` where ``mask`` is 1 and 0 elsewhere; unlike multiplication it also removes NaN and infinity."""
    return torch.where(mask.bool(), values, torch.zeros((), dtype=values.dtype, device=values.device))


def masked_sum(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the sum over the mask, along ``dim`` or over everything; 0 for an empty mask."""
    selected = where_mask(values, mask)
    return selected.sum() if dim is None else selected.sum(dim)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Return the mean over the mask, along ``dim`` or over everything; 0 for an empty mask."""
    count = (mask.sum() if dim is None else mask.sum(dim)).to(values.dtype)
    return masked_sum(values, mask, dim) / count.clamp(min=1)


AGGREGATION_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean")


def aggregate_loss(
    loss: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    *,
    batch_num_tokens: int | Tensor | None = None,
    global_batch_size: int | Tensor | None = None,
    loss_scale_factor: float | None = None,
    dp_size: int = 1,
) -> Tensor:
    """Aggregate ``loss [B, T]`` over ``mask [B, T]``.

    =========================  ==============================================================================
    token-mean                 sum of all tokens / ``batch_num_tokens``: long responses weigh more (DAPO)
    token-sum                  sum of all tokens
    seq-mean-token-sum         sum over tokens, mean over sequences
    seq-mean-token-sum-norm    the same divided by ``loss_scale_factor``, a constant length (Dr. GRPO)
    seq-mean-token-mean        mean over the tokens of a sequence, mean over sequences (GRPO)
    =========================  ==============================================================================

    Micro-batches: pass the mini-batch's ``batch_num_tokens`` and ``global_batch_size``; the results of the
    micro-batches then *add up* to the mini-batch's loss. Without them the counts of ``mask`` are used. Ranks: counts
    are global and ``dp_size`` compensates the averaging of gradients. Sequences with an empty mask are not counted; values
    outside the mask, NaN included, affect neither the result nor its gradient. Sums are taken in float32 or better.

    Args:
        batch_num_tokens: tokens with mask 1 in the whole mini-batch, over all ranks.
        global_batch_size: sequences with a non-empty mask in the whole mini-batch, over all ranks.
        loss_scale_factor: divisor of seq-mean-token-sum-norm. It has no default here: the width of the padded batch, a
            usual choice, would change the loss with the padding.
        dp_size: data-parallel ranks whose gradients are averaged.

    Raises:
        ConfigError: unknown mode, or seq-mean-token-sum-norm without ``loss_scale_factor``.
        ValueError: ``dp_size > 1`` without the global count that the mode divides by.
    """
    loss = wide(loss)
    if mode == "token-sum":
        return masked_sum(loss, mask) * dp_size
    if mode == "token-mean":
        return masked_sum(loss, mask) / _count(batch_num_tokens, mask.sum(), "batch_num_tokens", dp_size) * dp_size
    if mode == "seq-mean-token-mean":
        sequences = masked_mean(loss, mask, dim=-1)
    elif mode == "seq-mean-token-sum":
        sequences = masked_sum(loss, mask, dim=-1)
    elif mode == "seq-mean-token-sum-norm":
        if loss_scale_factor is None:
            raise ConfigError(
                "loss_agg_mode=seq-mean-token-sum-norm needs a loss_scale_factor",
                why="the divisor must be a constant; the width of a batch changes with its padding",
                fix="actor_rollout_ref.actor.loss_scale_factor=<longest response in tokens>",
            )
        sequences = masked_sum(loss, mask, dim=-1) / loss_scale_factor
    else:
        raise ConfigError(
            f"unknown loss_agg_mode '{mode}'",
            where="actor_rollout_ref.actor.loss_agg_mode",
            fix=did_you_mean(mode, AGGREGATION_MODES),
        )
    # an empty row adds exactly 0 to the sum; only the count must exclude it
    non_empty = (mask.sum(dim=-1) > 0).sum()
    return sequences.sum() / _count(global_batch_size, non_empty, "global_batch_size", dp_size) * dp_size


def _count(count: int | Tensor | None, local: Tensor, name: str, dp_size: int) -> int | Tensor:
    if count is None:
        if dp_size > 1:
            raise ValueError(f"with dp_size={dp_size} the loss needs {name} over all ranks")
        return local.clamp(min=1)
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
