"""Credit in conversations of several turns: tokens by turn, and returns of turns.

A turn is a stretch of sampled tokens between two answers of the environment. ``turn_ids [B, T]`` gives the turn number of
each token (0, 1, ...; ignored where the mask is 0). Values ``[B, K]`` have one entry per turn, with K the largest
number of turns; a turn without a sampled token is not a step of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.base import row_blocks
from hone.algorithms.advantages.scan import discounted_returns
from hone.algorithms.masked import where_mask
from hone.errors import ConfigError


@dataclass(frozen=True)
class Turns:
    """Sampled tokens of a batch by turn.

    Attributes:
        ids: ``[B, T]`` turn of each token, 0 outside the mask.
        mask: ``[B, T]`` boolean.
        present: ``[B, K]`` true where the turn has a sampled token.
    """

    ids: Tensor
    mask: Tensor
    present: Tensor

    @classmethod
    def from_ids(cls, turn_ids: Tensor, response_mask: Tensor) -> Turns:
        """Build from ``turn_ids``; ConfigError if a sampled token has a negative turn number."""
        mask = response_mask.bool()
        ids = where_mask(turn_ids, mask).long()
        lowest, highest = (int(x) for x in ids.aminmax()) if ids.numel() else (0, 0)
        if lowest < 0:
            row = int((ids < 0).any(dim=-1).nonzero()[0])
            raise ConfigError(
                f"turn_ids has a negative number on a sampled token of row {row}",
                why="every sampled token needs a turn",
                fix="number the turns 0, 1, ... or set response_mask to 0 there",
                where="turn_ids",
            )
        seen = torch.zeros(len(ids), highest + 1, dtype=torch.uint8, device=ids.device)
        seen.scatter_reduce_(1, ids, mask.view(torch.uint8), "amax")
        return cls(ids, mask, seen > 0)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``[B, T]`` over the sampled tokens of each turn, ``[B, K]`` float64."""
        sums = torch.zeros(self.present.shape, dtype=torch.float64, device=values.device)
        for rows in row_blocks(len(sums)):
            sums[rows].scatter_add_(1, self.ids[rows], where_mask(values[rows], self.mask[rows]).double())
        return sums

    def broadcast(self, values: Tensor) -> Tensor:
        """Copy the value of each turn to its sampled tokens, ``[B, K]`` to ``[B, T]``; 0 outside the mask."""
        return where_mask(values.gather(1, self.ids), self.mask)

    def place(self, values: Tensor) -> Tensor:
        """Put the value of each turn on its last sampled token, ``[B, K]`` to ``[B, T]``; 0 elsewhere."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        last = torch.full(self.present.shape, -1, device=self.ids.device)
        last = last.scatter_reduce_(1, self.ids, torch.where(self.mask, columns, -1), "amax")
        return where_mask(values.gather(1, self.ids), columns == last.gather(1, self.ids))


def turn_returns(rewards: Tensor, present: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted return of each turn, ``[B, K]``; turns that are not ``present`` are skipped and get 0."""
    return discounted_returns(where_mask(rewards, present), present, gamma)
