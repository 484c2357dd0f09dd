"""Discounted sums towards the end of a response, over sampled tokens only.

A recursion ``y_t = x_t + decay * y_{t+1}`` is a step at a time in a loop. Within a block of tokens it is a product with
a small triangular matrix of powers of ``decay``, and what flows from block to block is the same recursion over their
first elements, with ``decay ** block``. Tokens that are no steps of the policy are taken out first and put back after.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from hone.algorithms.advantages.tokens import row_blocks

BLOCK = 64


class Packing:
    """The selected tokens of some rows, moved to the front of their rows, and back.

    Args:
        mask: ``[R, T]`` boolean.

    Attributes:
        lengths: ``[R]`` selected tokens of each row.
        front: ``[R, L]`` true where a packed row has a token; L is the largest length.
    """

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask
        self.lengths = mask.sum(dim=-1)
        # rows without a gap are packed already: nothing is selected after something that is not
        self.in_front = not bool((mask[:, 1:] > mask[:, :-1]).any())
        longest = int(self.lengths.max()) if len(mask) else 0
        positions = torch.arange(longest, device=mask.device)
        self.front = mask[:, :longest] if self.in_front else positions < self.lengths[:, None]

    def pack(self, values: Tensor) -> Tensor:
        """``[R, T]`` to ``[R, L]`` float64, 0 after the last token of a row."""
        if self.in_front:
            return torch.where(self.front, values[:, : self.front.shape[1]].double(), 0.0)
        packed = torch.zeros(self.front.shape, dtype=torch.float64, device=values.device)
        return packed.masked_scatter_(self.front, values[self.mask].double())

    def unpack_into(self, target: Tensor, packed: Tensor) -> None:
        """Write ``[R, L]`` to where its tokens stand in ``target [R, T]``, and 0 elsewhere."""
        if self.in_front:
            width = packed.shape[1]
            target[:, width:] = 0
            target[:, :width] = packed * self.front
        else:
            target.zero_().masked_scatter_(self.mask, packed[self.front].to(target.dtype))


def suffix_sums(values: Tensor, decay: float) -> Tensor:
    """``y_t = x_t + decay * y_{t+1}`` along the last dimension of ``[R, L]`` float64."""
    rows, length = values.shape
    if length <= BLOCK:
        return values @ _powers(length, decay, values.device)
    blocks = pad(values, (0, -length % BLOCK)).view(rows, -1, BLOCK)
    within = blocks @ _powers(BLOCK, decay, values.device)
    following = pad(suffix_sums(within[..., 0], decay**BLOCK)[:, 1:], (0, 1))
    reach = decay ** torch.arange(BLOCK, 0, -1, dtype=values.dtype, device=values.device)
    return within.addcmul_(following[..., None], reach).flatten(1)[:, :length]


def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> Tensor:
    """``G_t = r_t + gamma * G_{next selected token}``, ``[B, T]``; 0 outside the mask."""
    returns = torch.empty_like(token_level_rewards)
    for rows in row_blocks(len(returns)):
        packing = Packing(response_mask[rows])
        packing.unpack_into(returns[rows], suffix_sums(packing.pack(token_level_rewards[rows]), gamma))
    return returns


def _powers(size: int, decay: float, device: torch.device) -> Tensor:
    """``[k, t] = decay ** (k - t)`` for k >= t, else 0."""
    steps = torch.arange(size, dtype=torch.float64, device=device)
    gap = steps[:, None] - steps
    return torch.where(gap >= 0, decay ** gap.clamp(min=0), 0.0)
