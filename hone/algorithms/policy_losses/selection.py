"""Select tokens of a batch, independent of the order of rows, the split and the padding."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.algorithms.masked import where_mask

_MULTIPLIER = (
    -7046029254386353131
)  # odd, 2^64 / golden ratio; multiplying moves bits upwards, the shift moves them down


def exact_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the mask, summed in float64 and rounded to float32.

    Rounding hides the order of the sum, so that a comparison with this mean is the same for any order.
    """
    return (where_mask(values, mask).sum(dtype=torch.float64) / mask.sum().clamp(min=1)).float()


def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return each token's contribution ``(log pi - mean)(A - mean)`` to their covariance, float64 ``[B, T]``."""
    centred, push = (x.to(torch.float64, copy=True).sub_(exact_mean(x, mask)) for x in (log_probs, advantages))
    return centred.mul_(push)


def draw(candidates: Tensor, count: int, *columns: Tensor) -> Tensor:
    """Draw ``count`` of the tokens that ``candidates`` (bool) marks, pseudo-randomly (bool); all, if there are no more.

    A token is drawn by a hash of its entries in ``columns``, not by its position: the draw is reproducible and the same for
    any order of rows. Tokens equal in every column are drawn together.
    """
    places = candidates.flatten().nonzero()[:, 0]
    if count <= 0:
        return torch.zeros_like(candidates)
    if len(places) <= count:
        return candidates
    hashes = _hash([column.flatten()[places] for column in columns])
    drawn = torch.zeros(candidates.numel(), dtype=torch.bool, device=candidates.device)
    drawn[places] = hashes <= hashes.kthvalue(count).values
    return drawn.view(candidates.shape)


def draw_largest(score: Tensor, candidates: Tensor, count: int, *columns: Tensor) -> Tensor:
    """Return the ``count`` candidates with the largest score (bool); :func:`draw` decides among equal scores."""
    count = min(count, int(candidates.sum()))
    if count == 0:
        return torch.zeros_like(candidates)
    last = score.masked_fill(~candidates, -torch.inf).flatten().topk(count).values[-1]
    above = candidates & (score > last)
    return above | draw(candidates & (score == last), count - int(above.sum()), *columns)


def share_of(mask: Tensor, share: float) -> int:
    """Return ``share`` of the number of selected tokens, at least 1."""
    return max(int(share * int(mask.sum())), 1)


def _hash(columns: list[Tensor]) -> Tensor:
    """Return 63 well mixed bits of each position's integers and float32 values; -0 counts as 0."""
    mixed = torch.zeros_like(columns[0], dtype=torch.int64)
    for column in columns:
        bits = (column.float() + 0.0).view(torch.int32) if column.is_floating_point() else column
        mixed = (mixed ^ bits.long()) * _MULTIPLIER
        mixed = mixed ^ (mixed >> 32)
    return (mixed * _MULTIPLIER) & 0x7FFFFFFFFFFFFFFF
