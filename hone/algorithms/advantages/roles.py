"""Episodes in which the policy has several roles: the return of a role, compared with returns of that role alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hone.algorithms.advantages.base import Groups, Result, number, register_estimator
from hone.algorithms.advantages.group_relative import Ids, normalised
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


def _sampled_turns(turns: Turns, row: int, known: Sequence[object], where: str) -> list[int]:
    """Return the turns of a row with sampled tokens; ConfigError if one of them has no role."""
    present: list[int] = turns.present[row].nonzero()[:, 0].tolist()
    if present and present[-1] >= len(known):
        raise ConfigError(
            f"{where} of row {row} has {len(known)} turns, but turn {present[-1]} has sampled tokens",
            why="the advantage of a turn is that of its role",
            fix="pass an entry for each turn",
            where=where,
        )
    return present


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
        earned = role_returns(rewards[row].tolist(), [role for role, _ in known])
        for turn in _sampled_turns(turns, row, known, "turn_baselines"):
            role, baseline = known[turn]
            returns[row, turn], baselines[row, turn] = earned[role], baseline
    dtype = token_level_rewards.dtype
    return turns.broadcast((returns - baselines).to(dtype)), turns.broadcast(returns.to(dtype))


@register_estimator(
    "hierarchical_grpo",
    formula="A_p = R_p - mean of R over the peers of role p, divided by their std + epsilon as in grpo; peers of solver#2: all solvers of "
    "the episode; peers of proposer: the proposers of the group",
    paper="Shao et al. 2024 (GRPO), arXiv:2402.03300, with a group for each role; the groups are those of prime-rl's proposer-solver training",
    group_of_one="no peers: the advantage is 0",
    scope="group",
)
def hierarchical_grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    turn_ids: Tensor,
    turn_roles: Sequence[Sequence[str]],
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Compare what each role earned in an episode with its peers: a proposer with proposers, solvers with solvers of the same problem.

    A role with a number (``solver#2``) is one of several attempts at what an episode posed, and its peers are the other numbers there.
    Peers of another role have the same name in the other episodes of the group. All tokens of a role's turns have its advantage;
    returns equal the role's return. With one role it is ``grpo``, but that a group of one has advantage 0.
    """
    turns = Turns.from_ids(turn_ids, response_mask)
    rewards = turns.sum(token_level_rewards)
    names = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
    peers, earned, places = [], [], []
    for row, roles in enumerate(turn_roles):
        present = _sampled_turns(turns, row, roles, "turn_roles")
        returns = role_returns(rewards[row].tolist(), roles)
        for role in dict.fromkeys(roles[turn] for turn in present):
            name, numbered, _ = role.partition("#")
            peers.append((row, name) if numbered else (names[row], name, "group"))
            earned.append(returns[role])
            places.append((row, [turn for turn in present if roles[turn] == role]))
    values = torch.tensor(earned, dtype=torch.float64, device=rewards.device)
    groups = Groups.from_numbers(*number(peers, rewards.device), torch.ones_like(values, dtype=torch.bool))
    compared = normalised(values, groups, by_std=norm_adv_by_std_in_grpo, epsilon=epsilon)
    compared = torch.where(groups.singleton, 0.0, compared)
    advantages, returns_of = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for (row, role_turns), advantage, value in zip(places, compared, values, strict=True):
        advantages[row, role_turns], returns_of[row, role_turns] = advantage, value
    dtype = token_level_rewards.dtype
    return turns.broadcast(advantages.to(dtype)), turns.broadcast(returns_of.to(dtype))
