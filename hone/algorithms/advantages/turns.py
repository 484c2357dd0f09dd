"""Credit in conversations of several turns: placement of rewards, and returns of turns and trajectories.

A turn is a stretch of sampled tokens between two answers of the environment. ``turn_ids [B, T]`` gives the turn number of
each token (0, 1, ...; ignored where the mask is 0). Values ``[B, K]`` have one entry per turn, with K the largest
number of turns; a turn without a sampled token is not a step of the policy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hone.algorithms.advantages.scan import discounted_returns
from hone.algorithms.advantages.tokens import row_blocks
from hone.algorithms.masked import where_mask
from hone.errors import ConfigError, did_you_mean

LEVELS = ("trajectory", "turn", "token")


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


def turn_rewards(token_level_rewards: Tensor, response_mask: Tensor, turn_ids: Tensor) -> Tensor:
    """Return the reward of each turn, ``[B, K]`` float64: the sum over its sampled tokens."""
    return Turns.from_ids(turn_ids, response_mask).sum(token_level_rewards)


def turn_returns(rewards: Tensor, present: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted return of each turn, ``[B, K]``; turns that are not ``present`` are skipped and get 0."""
    return discounted_returns(where_mask(rewards, present), present, gamma)


def place_rewards(
    rewards: Tensor, response_mask: Tensor, level: str = "trajectory", *, turn_ids: Tensor | None = None
) -> Tensor:
    """Convert rewards of any level to token rewards ``[B, T]``; the sum of a row does not change.

    ==============  ============  ==============================================================================
    ``trajectory``  ``[B]``       on the last sampled token of the row
    ``turn``        ``[B, K]``    each on the last sampled token of its turn
    ``token``       ``[B, T]``    unchanged; a reward on a token that the policy did not sample (tool output
                                  that earned it) moves to the last sampled token before it, or to the first one
    ==============  ============  ==============================================================================

    A row without a sampled token gets no reward. NaN outside the mask is ignored.

    Raises:
        ConfigError: unknown level, a shape that does not match it, no ``turn_ids``, or a reward other than 0 for a turn
            without a sampled token in a row that has some.
    """
    mask = response_mask.bool()
    if level == "trajectory":
        _check_shape(rewards, mask.shape[:1], level)
        return Turns.from_ids(torch.zeros_like(mask, dtype=torch.int64), mask).place(rewards[:, None])
    if level == "token":
        _check_shape(rewards, mask.shape, level)
        return _to_sampled_tokens(rewards, mask)
    if level != "turn":
        raise ConfigError(f"unknown level '{level}'", fix=did_you_mean(level, LEVELS))
    if turn_ids is None:
        raise ConfigError("rewards of turns need turn_ids", fix="pass turn_ids [B, T], the turn of each token")
    turns = Turns.from_ids(turn_ids, mask)
    return turns.place(_fitted(rewards, turns))


def _fitted(rewards: Tensor, turns: Turns) -> Tensor:
    """Return ``[B, K]`` with one column per turn, if no reward is lost by it."""
    _check_shape(rewards[:, :0], torch.Size([len(turns.present), 0]), "turn")
    width = max(rewards.shape[1], turns.present.shape[1])
    rewards, present = (torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in (rewards, turns.present))
    lost = (rewards != 0) & ~present & present.any(dim=-1, keepdim=True)
    if lost.any():
        row, turn = lost.nonzero()[0].tolist()
        raise ConfigError(
            f"row {row} has a reward of {float(rewards[row, turn]):g} for turn {turn}, which has no sampled token",
            why="the reward would be lost",
            fix="give it to the previous turn, whose tokens earned it",
            where="turn_ids",
        )
    return rewards[:, : turns.present.shape[1]]


def _to_sampled_tokens(rewards: Tensor, mask: Tensor) -> Tensor:
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    before = torch.where(mask, columns, -1).cummax(dim=-1).values
    first = mask.long().argmax(dim=-1, keepdim=True)
    target = torch.where(before < 0, first, before)
    earned = torch.where(mask | ~rewards.isnan(), rewards, 0.0)
    return where_mask(torch.zeros_like(rewards).scatter_add_(1, target, earned), mask)


def _check_shape(rewards: Tensor, shape: torch.Size, level: str) -> None:
    if rewards.shape != shape:
        expected = {"trajectory": "[B]", "turn": "[B, K]", "token": "[B, T]"}[level]
        raise ConfigError(
            f"rewards of level '{level}' have shape {list(rewards.shape)}",
            fix=f"pass {expected}, here with B={shape[0]}",
        )
