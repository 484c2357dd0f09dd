"""Discounted sums towards the end of a response, over sampled tokens only.

A loop computes the recursion ``y_t = x_t + decay * y_{t+1}`` one step at a time. Within a block of tokens it is a matmul with
a small triangular matrix of powers of ``decay``. From block to block it is the same recursion over their first
elements, with ``decay ** block``. Tokens that are not steps of the policy are removed first and restored afterwards.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hone.algorithms.advantages.base import row_blocks

BLOCK = 32


class Packing:
    """Selected tokens of some rows, moved to the front of their rows, and the way back."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.lengths = mask.sum(dim=-1)  # ``[R]`` number of selected tokens of each row
        longest = int(self.lengths.max()) if len(mask) else 0
        # rows without a gap are packed already: no selected token follows an unselected one
        self.in_front = not bool((mask[:, 1:] > mask[:, :-1]).any())
        if self.in_front:
            self.front = mask[:, :longest]
            return
        columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
        # ``[R, L]`` true where a packed row has a token; L is the largest length
        self.front = columns[:, :longest] < self.lengths[:, None]
        self._target = mask.cumsum(dim=-1).sub_(1).clamp_(min=0)
        # an additional column receives unselected tokens, and is removed
        target = self._target.masked_fill(~mask, longest)
        self._source = columns.new_zeros(len(mask), longest + 1).scatter_(1, target, columns)[:, :longest]

    def pack(self, values: Tensor) -> Tensor:
        """Pack ``[R, T]`` to ``[R, L]`` float64, 0 after the last token of a row."""
        packed = values[:, : self.front.shape[1]] if self.in_front else values.gather(1, self._source)
        return torch.where(self.front, packed.double(), 0.0)

    def unpack_into(self, target: Tensor, packed: Tensor) -> None:
        """Write ``[R, L]`` to the places of its tokens in ``target [R, T]``, and 0 elsewhere."""
        if self.in_front:
            width = packed.shape[1]
            target[:, width:] = 0
            target[:, :width] = packed
            target[:, :width].mul_(self.front)
        else:
            target.copy_(packed.to(target.dtype).gather(1, self._target)).mul_(self.mask)


def packings(mask: Tensor) -> list[tuple[slice, Packing]]:
    """Return blocks of rows of ``[B, T]`` and their packings."""
    return [(rows, Packing(mask[rows])) for rows in row_blocks(len(mask))]


def suffix_sums(values: Tensor, decay: float) -> Tensor:
    """Return ``y_t = x_t + decay * y_{t+1}`` along the last dimension of ``[R, L]`` float64."""
    rows, length = values.shape
    if length <= BLOCK:
        return values @ _powers(length, decay, values.device)
    blocks = pad(values, (0, -length % BLOCK)).view(rows, -1, BLOCK)
    within = blocks @ _powers(BLOCK, decay, values.device)
    following = pad(suffix_sums(within[..., 0], decay**BLOCK)[:, 1:], (0, 1))
    reach = decay ** torch.arange(BLOCK, 0, -1, dtype=values.dtype, device=values.device)
    return within.addcmul_(following[..., None], reach).flatten(1)[:, :length]


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """Return ``G_t = r_t + gamma * G_{next selected token}``, ``[B, T]``; 0 outside the mask."""
    returns = torch.empty_like(token_level_rewards)
    for rows, packing in packings(response_mask):
        packing.unpack_into(returns[rows], suffix_sums(packing.pack(token_level_rewards[rows]), gamma))
    return returns


def _powers(size: int, decay: float, device: torch.device) -> Tensor:
    """Return ``[k, t] = decay ** (k - t)`` for k >= t, else 0."""
    steps = torch.arange(size, dtype=torch.float64, device=device)
    gap = steps[:, None] - steps
    return torch.where(gap >= 0, decay ** gap.clamp(min=0), 0.0)
