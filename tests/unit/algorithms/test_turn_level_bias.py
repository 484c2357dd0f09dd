"""Turn-level estimators and the bias of a random number of turns: expected gradients, by exact enumeration of all groups."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hone.algorithms import advantage_estimators

HORIZON, ACTIONS = 3, 2
STOP = {0: 0.3, 1: 0.7}
"""Probability that the environment ends the episode after an action, before its last turn."""


@dataclass
class Episode:
    """One possible episode: actions by turn, the probability that the environment draws it, and the reward of each turn."""

    actions: list[int] = field(default_factory=list)
    chance: float = 1.0
    rewards: list[float] = field(default_factory=list)


def episodes(past: Episode | None = None) -> list[Episode]:
    """All episodes; a reward of a turn depends on the whole past, and the last one on all actions."""
    past = past or Episode()
    possible = []
    for action in range(ACTIONS):
        actions = [*past.actions, action]
        reward = [*past.rewards, 0.3 * action * len(actions) - 0.1 * sum(actions)]
        last = len(actions) == HORIZON
        ended = 1.0 if last else STOP[action]
        possible.append(
            Episode(actions, past.chance * ended, [*reward[:-1], reward[-1] + (1.0 if actions[0] == action else 0.2)])
        )
        if not last:
            possible += episodes(Episode(actions, past.chance * (1 - ended), reward))
    return possible


class World:
    """The episodes, with a tabular policy over the pasts."""

    def __init__(self) -> None:
        self.all = episodes()
        pasts = sorted({tuple(e.actions[:k]) for e in self.all for k in range(len(e.actions))})
        torch.manual_seed(0)
        self.logits = torch.randn(len(pasts), ACTIONS, dtype=torch.float64, requires_grad=True)
        table = self.logits.log_softmax(-1)
        self.place = {past: number for number, past in enumerate(pasts)}
        self.log_probs = [
            torch.stack([table[self.place[tuple(e.actions[:k])], a] for k, a in enumerate(e.actions)]) for e in self.all
        ]
        chances = torch.tensor([e.chance for e in self.all], dtype=torch.float64)
        self.probability = chances * torch.stack([values.sum().exp() for values in self.log_probs])
        self.gain = torch.tensor([sum(e.rewards) for e in self.all], dtype=torch.float64)

    def gradient(self) -> Tensor:
        """The gradient of the expected reward."""
        return torch.autograd.grad((self.probability * self.gain).sum(), self.logits, retain_graph=True)[0]

    def rows(self, members: list[int]) -> dict[str, Tensor]:
        """Columns of episodes: two tokens a turn, the reward on the second; a token of the environment between turns."""
        shape = len(members), 3 * HORIZON
        mask, rewards, turns = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64), torch.zeros(shape).long()
        for row, number in enumerate(members):
            for k, reward in enumerate(self.all[number].rewards):
                mask[row, 3 * k : 3 * k + 2], turns[row, 3 * k : 3 * k + 3] = 1, k
                rewards[row, 3 * k + 1] = reward
        return {"rewards": rewards, "mask": mask, "turns": turns}

    def expected(self, estimator: str, size: int, **options: float) -> Tensor:
        """The expected policy gradient of an estimator over all groups of ``size`` episodes."""
        groups = list(itertools.product(range(len(self.all)), repeat=size))
        members = [number for group in groups for number in group]
        rows = self.rows(members)
        advantages, _ = advantage_estimators.get(estimator)(
            rows["rewards"],
            rows["mask"],
            group_ids=[number for number in range(len(groups)) for _ in range(size)],
            turn_ids=rows["turns"],
            **options,
        )
        return self.ascent(advantages, members, size)

    def ascent(self, advantages: Tensor, members: list[int], size: int) -> Tensor:
        chance = self.probability.detach()
        weights = torch.tensor(members).view(-1, size)
        weights = chance[weights].prod(-1).repeat_interleave(size) / size
        terms = [
            weight * (advantages[row, 0 : 3 * len(self.log_probs[number]) : 3] * self.log_probs[number]).sum()
            for row, (number, weight) in enumerate(zip(members, weights, strict=True))
        ]
        return torch.autograd.grad(torch.stack(terms).sum(), self.logits, retain_graph=True)[0]


WORLD = World()


def test_probabilities_add_up() -> None:
    assert abs(float(WORLD.probability.detach().sum()) - 1) < 1e-12
    assert {len(e.actions) for e in WORLD.all} == {1, 2, 3}


def test_leave_one_out_returns_of_turns_are_unbiased() -> None:
    for size in (1, 2):
        torch.testing.assert_close(WORLD.expected("turn_rloo", size), WORLD.gradient(), atol=1e-12, rtol=0)


def test_a_mean_with_the_turn_itself_is_biased_by_the_number_that_reached_it() -> None:
    """Turn k is compared with those that reached it; if few did, its own return is a larger part of the mean."""
    options = {"norm_adv_by_std_in_grpo": False, "step_advantage_w": 1.0}
    both, whole = (
        WORLD.expected("gigpo", 2, **options),
        WORLD.expected("gigpo", 2, **options | {"step_advantage_w": 0.0}),
    )
    shares = ((both - whole) / WORLD.gradient())[:, 0]
    first, second, third = (shares[WORLD.place[past]] for past in ((), (0,), (0, 1)))
    torch.testing.assert_close(first, torch.tensor(0.5, dtype=torch.float64))
    assert float(second) < 0.4 and float(third) < 0.2


def values_of(world: World, exact: bool) -> Tensor:
    """The value before each turn of every episode: the expected reward to come, or any function of the past."""
    worth = torch.zeros(len(world.all), HORIZON, dtype=torch.float64)
    for number, episode in enumerate(world.all):
        for k in range(len(episode.actions)):
            past = episode.actions[:k]
            same = [
                (float(world.probability.detach()[i]), sum(e.rewards[k:]))
                for i, e in enumerate(world.all)
                if len(e.actions) > k and e.actions[:k] == past
            ]
            total = sum(chance for chance, _ in same)
            worth[number, k] = sum(c * r for c, r in same) / total if exact else 0.7 * len(past) - sum(past)
    return worth


def test_values_by_forks_are_unbiased() -> None:
    """Turns are chosen by the past alone; a value is a mean of continuations, replaced here by its expectation."""
    members = [number for pair in itertools.product(range(len(WORLD.all)), repeat=2) for number in pair]
    rows, worth = WORLD.rows(members), values_of(WORLD, exact=True)
    earned = [[sum(e.rewards[:k]) for k in range(len(e.actions))] for e in WORLD.all]
    forked = [
        {k: float(worth[n, k]) + earned[n][k] for k in range(1, len(e.actions)) if k == 2 or e.actions[0] == 1}
        for n, e in enumerate(WORLD.all)
    ]
    advantages, _ = advantage_estimators.get("turn_value_by_forks")(
        rows["rewards"],
        rows["mask"],
        group_ids=[place // 2 for place in range(len(members))],
        turn_ids=rows["turns"],
        turn_values=[forked[number] for number in members],
        old_log_probs=rows["rewards"],
    )
    assert sum(map(bool, forked)) > 3
    torch.testing.assert_close(WORLD.ascent(advantages, members, 2), WORLD.gradient(), atol=1e-12, rtol=0)


def test_a_critic_of_turns_is_unbiased() -> None:
    """With lambda 1 whatever its values; with lambda below 1 where they are exact."""
    members = list(range(len(WORLD.all)))
    rows = WORLD.rows(members)
    for exact, lam in ((False, 1.0), (True, 1.0), (True, 0.5), (True, 0.0)):
        values = torch.full_like(rows["rewards"], 9.0)
        values[:, ::3] = values_of(WORLD, exact)
        advantages, returns = advantage_estimators.get("turn_gae")(
            rows["rewards"], rows["mask"], values=values, turn_ids=rows["turns"], lam=lam, whiten=False
        )
        torch.testing.assert_close(WORLD.ascent(advantages, members, 1), WORLD.gradient(), atol=1e-12, rtol=0)
        if lam == 1.0:  # the critic's target is the reward to come, on all tokens of a turn
            for number, episode in enumerate(WORLD.all):
                for k in range(len(episode.rewards)):
                    assert abs(float(returns[number, 3 * k + 1]) - sum(episode.rewards[k:])) < 1e-12
    wrong = torch.full_like(rows["rewards"], 9.0)
    wrong[:, ::3] = values_of(WORLD, exact=False)
    advantages, _ = advantage_estimators.get("turn_gae")(
        rows["rewards"], rows["mask"], values=wrong, turn_ids=rows["turns"], lam=0.5, whiten=False
    )
    assert float((WORLD.ascent(advantages, members, 1) - WORLD.gradient()).norm()) > 0.01
