"""GiGPO: groups of whole responses, and within them groups of turns that start from the same state."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Groups, Result, broadcast, number, register_estimator, sequence_scores
from hone.algorithms.advantages.group_relative import normalised
from hone.algorithms.advantages.turns import Turns, turn_returns
from hone.errors import ConfigError

Ids = Sequence[Any] | Tensor


@register_estimator(
    "gigpo",
    formula="A = A_response + step_advantage_w * A_turn; A_response as in GRPO, A_turn = (R - mean) / (std + epsilon) over "
    "the group's turns from the same state, R = discounted reward to come from the turn",
    paper="Feng et al. 2025 (GiGPO), arXiv:2505.10978, episode and step relative advantages",
    group_of_one="no baseline: A_response is the score itself; a turn whose state occurs once has A_turn = 0",
    scope="group",
)
def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    turn_ids: Tensor,
    turn_group_ids: Sequence[Sequence[Any]] | Tensor | None = None,
    gamma: float = 1.0,
    step_advantage_w: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Compare responses with responses, and turns with turns from the same state.

    ``turn_group_ids`` names the state before each turn: one sequence of names per row, or ``[B, K]``; equal names in a
    prompt group mean the same state. Without it, turn k of a response is compared with turn k of the others. The advantage
    is the same on all tokens of a turn; returns equal advantages. The paper uses ``gamma=0.95``. Environment
    rewards are those on the tokens of a turn.
    """
    groups, turns = Groups.from_ids(group_ids, response_mask), Turns.from_ids(turn_ids, response_mask)
    how = {"by_std": norm_adv_by_std_in_grpo, "epsilon": epsilon}
    whole = normalised(sequence_scores(token_level_rewards), groups, **how)
    returns = turn_returns(turns.sum(token_level_rewards), turns.present, gamma).flatten()
    states = _states(groups, turns, turn_group_ids)
    steps = torch.where(states.singleton, 0.0, normalised(returns, states, **how)).view_as(turns.present)
    dtype = token_level_rewards.dtype
    advantages = broadcast(whole, response_mask, dtype) + step_advantage_w * turns.broadcast(steps.to(dtype))
    return advantages, advantages.clone()


def _states(groups: Groups, turns: Turns, names: Sequence[Sequence[Any]] | Tensor | None) -> Groups:
    """Return groups of turns, over ``[B * K]``: the same prompt group and the same state."""
    rows, width = turns.present.shape
    if names is None:
        state = torch.arange(width, device=turns.ids.device).expand(rows, width)
    else:
        state = _numbered(names, turns)
    key = groups.index[:, None] * (int(state.max()) + 1) + state
    index, size = number(key.flatten(), key.device)
    return Groups.from_numbers(index, size, turns.present.flatten())


def _numbered(names: Sequence[Sequence[Any]] | Tensor, turns: Turns) -> Tensor:
    """Return numbers ``[B, K]`` for names, 0 for turns that do not exist."""
    rows, width = turns.present.shape
    if len(names) != rows:
        raise ConfigError(
            f"turn_group_ids has {len(names)} rows for {rows} sequences",
            fix="pass one sequence of state names per row",
            where="turn_group_ids",
        )
    lengths = torch.tensor([len(row) for row in names], device=turns.ids.device)
    named = torch.arange(width, device=turns.ids.device) < lengths[:, None]
    missing = turns.present & ~named
    if missing.any():
        row, turn = missing.nonzero()[0].tolist()
        raise ConfigError(
            f"turn_group_ids of row {row} names {int(lengths[row])} states, but turn {turn} has sampled tokens",
            why="a turn is compared with the other turns from its state",
            fix="name the state before each turn, or pass turn_group_ids=None to compare turns of the same number",
            where="turn_group_ids",
        )
    if isinstance(names, Tensor):
        index, _ = number(names[:, :width].flatten(), turns.ids.device)
    else:
        index, _ = number(list(chain.from_iterable(row[:width] for row in names)), turns.ids.device)
    return torch.zeros(rows, width, dtype=torch.int64, device=turns.ids.device).masked_scatter_(named, index)
