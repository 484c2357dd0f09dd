"""Self-play: the return of each role of a game, against a moving average of the returns of that role."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Result, register_estimator
from hone.algorithms.advantages.turn_level import Turns
from hone.errors import ConfigError


def role_returns(turn_rewards: Sequence[float], roles: Sequence[str]) -> dict[str, float]:
    """Return the sum of the rewards of each role's turns; rewards beyond the last role are of turns that do not exist."""
    returns = dict.fromkeys(roles, 0.0)
    for role, reward in zip(roles, turn_rewards, strict=False):
        returns[role] += reward
    return returns


class RoleBaselines:
    """Exponential moving average of the returns of each role of each game, from 0 on.

    >>> baselines = RoleBaselines(decay=0.75)
    >>> baselines.update({"game/0": 1.0, "game/1": -1.0}), baselines.update({"game/0": 1.0})
    ({'game/0': 0.25, 'game/1': -0.25}, {'game/0': 0.4375})
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.values: dict[str, float] = {}

    def update(self, returns: Mapping[str, float]) -> dict[str, float]:
        """Take the returns of one episode into the averages, and return those of its roles."""
        for role, earned in returns.items():
            self.values[role] = self.decay * self.values.get(role, 0.0) + (1 - self.decay) * earned
        return {role: self.values[role] for role in returns}


@register_estimator(
    "rae",
    formula="A_p = R_p - b_p, for each role p of an episode; b_p = decay b_p + (1 - decay) R_p, a moving average over episodes",
    paper="Liu et al. 2025 (SPIRAL), arXiv:2506.24119, role-conditioned advantage estimation",
    scope="sequence",
)
def rae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    turn_ids: Tensor,
    turn_baselines: Sequence[Sequence[tuple[str, float]]],
) -> Result:
    """Compare what each role earned in an episode with the moving average of that role (role-conditioned advantage estimation).

    A role is a seat of a game whose seats the policy plays all; an episode without roles has one, named after its data source. The
    average takes an episode's return in before it is compared, as in the paper: the advantage is ``decay`` times the difference to the
    average before. All tokens of a role's turns have its advantage; returns equal the role's return.
    """
    turns = Turns.from_ids(turn_ids, response_mask)
    rewards = turns.sum(token_level_rewards)
    returns, baselines = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for row, known in enumerate(turn_baselines):
        present = turns.present[row].nonzero()[:, 0].tolist()
        if present and present[-1] >= len(known):
            raise ConfigError(
                f"turn_baselines of row {row} has {len(known)} turns, but turn {present[-1]} has sampled tokens",
                why="the advantage of a turn is that of its role",
                fix="pass a pair of role and baseline for each turn",
                where="turn_baselines",
            )
        earned = role_returns(rewards[row].tolist(), [role for role, _ in known])
        for turn in present:
            role, baseline = known[turn]
            returns[row, turn], baselines[row, turn] = earned[role], baseline
    dtype = token_level_rewards.dtype
    return turns.broadcast((returns - baselines).to(dtype)), turns.broadcast(returns.to(dtype))
