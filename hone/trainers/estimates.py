"""From a batch to advantages: the inputs that an estimator asks for, taken from the columns of the batch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import AdvantageEstimator
from hone.algorithms.advantages.base import INPUTS
from hone.config.algorithm import AlgorithmConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.types import Trajectory
from hone.errors import ConfigError
from hone.rewards.score import Score
from hone.trainers.split_episodes import apart, is_split, joined

COLUMNS = {
    "groups": "uid",
    "values": "values",
    "greedy_baseline": "reward_baselines",
    "old_log_probs": "old_log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "rollout_is_weights": "rollout_is_weights",
    "reward_components": "score",
    "turns": "response_mask",
    "turn_groups": "trajectory",
}
"""What an estimator may take, and the column that it is made of."""


def needed_columns(estimator: AdvantageEstimator) -> tuple[str, ...]:
    """The columns that the advantages cannot do without."""
    return ("token_level_rewards", *(COLUMNS[need] for need in sorted(estimator.needs)))


def suppliers(estimator: AdvantageEstimator) -> str:
    """What the user can set so that the estimator gets what it needs, for an error message."""
    return "; ".join(INPUTS[need][1] for need in sorted(estimator.needs) if need not in ("groups", "old_log_probs"))


def estimate(estimator: AdvantageEstimator, batch: Batch, algorithm: AlgorithmConfig) -> tuple[Ragged, Ragged]:
    """Return advantages and returns of the whole batch, aligned with ``response_mask``; an episode counts once, whatever the number
    of its parts.

    Options of the estimator take the value of the key of their name under ``algorithm``, or in ``algorithm.adv_kwargs``.
    """
    if is_split(batch):
        columns = {
            "response_mask",
            "token_level_rewards",
            *(COLUMNS[name] for name in estimator.needs | estimator.uses),
        }
        whole = estimate(estimator, joined(batch, columns), algorithm)
        return apart(whole[0], batch), apart(whole[1], batch)
    mask = batch.ragged("response_mask")
    taken = [name for name in estimator.needs | estimator.uses if COLUMNS[name] in batch]
    advantages, returns = estimator(
        batch.ragged("token_level_rewards").to_padded(),
        mask.to_padded(),
        **{INPUTS[name][0]: _input(name, batch, algorithm) for name in taken},
        **estimator_options(estimator, algorithm),
    )
    return Ragged.from_padded(advantages, mask.lengths), Ragged.from_padded(returns, mask.lengths)


def estimator_options(estimator: AdvantageEstimator, algorithm: AlgorithmConfig) -> dict[str, Any]:
    """The options of an estimator as configured; what ``adv_kwargs`` names wins."""
    settings = vars(algorithm)
    return {name: settings[name] for name in estimator.options if name in settings} | algorithm.adv_kwargs


def reward_components(scores: Sequence[Score], keys: Sequence[str]) -> dict[str, Tensor]:
    """The terms ``keys`` of the scores, each ``[B]``; ``score`` is the reward itself. A response without a score has 0.

    Raises:
        ConfigError: no key is named, or a score lacks one.
    """
    names = sorted({"score"}.union(*(score.terms for score in scores)))
    where, fix = "algorithm.gdpo_reward_keys", f"algorithm.gdpo_reward_keys=[{','.join(names)}]"
    if not keys:
        raise ConfigError("no reward component is named", why="each is normalised by itself", fix=fix, where=where)
    terms_of = [{"score": score.quality} | score.terms for score in scores]
    for key in keys:
        lacking = sum(score.error is None and key not in terms for score, terms in zip(scores, terms_of, strict=True))
        if lacking:
            raise ConfigError(
                f"{lacking} of {len(scores)} scores have no term '{key}'; there are {names}",
                why="each component is normalised by itself, so every response needs a value of it",
                fix=fix,
                where=where,
            )
    return {key: torch.tensor([terms.get(key, 0.0) for terms in terms_of]) for key in keys}


def turn_ids(mask: Tensor) -> Tensor:
    """The turn of each token, ``[B, T]``: a turn is an unbroken run of tokens that the policy sampled."""
    chosen = mask.bool()
    before = torch.nn.functional.pad(chosen, (1, 0))[:, :-1]
    return ((chosen & ~before).cumsum(-1) - 1).clamp(min=0)


def turn_states(trajectory: Trajectory) -> list[tuple]:
    """What names the state before each turn: the prompt, then what the environment said last."""
    states, seen, place = [], (trajectory.uid,), 0
    for sampled, run in itertools.groupby(trajectory.response_mask):
        length = len(list(run))
        if sampled:
            states.append(seen)
        else:
            seen = (trajectory.uid, *trajectory.response_ids[place : place + length])
        place += length
    return states


def _input(name: str, batch: Batch, algorithm: AlgorithmConfig) -> Any:
    made: dict[str, Callable[[], Any]] = {
        "groups": lambda: batch.objects("uid"),
        "greedy_baseline": lambda: batch.tensor("reward_baselines"),
        "reward_components": lambda: reward_components(batch.objects("score"), algorithm.gdpo_reward_keys),
        "turns": lambda: turn_ids(batch.ragged("response_mask").to_padded()),
        "turn_groups": lambda: [turn_states(trajectory) for trajectory in batch.objects("trajectory")],
    }
    return made[name]() if name in made else batch.ragged(COLUMNS[name]).to_padded()
