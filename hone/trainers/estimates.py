"""Advantages of a batch: the columns of the batch are the inputs of the estimator; and the rows that the updates see.

Advantages and reports use the complete batch. The updates see it without tokens that rollout correction rejected, and resampled for PF-PPO.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import AdvantageEstimator, largest_share, rollout_correction
from hone.algorithms.advantages.base import INPUTS
from hone.algorithms.advantages.roles import RoleBaselines, role_returns
from hone.algorithms.advantages.turn_level import Turns
from hone.algorithms.resampling import resample
from hone.config.algorithm import AlgorithmConfig
from hone.config.derived import correction_settings
from hone.data.batch import Batch, Column, episode_rows
from hone.data.ragged import Ragged
from hone.data.seeding import derive_seed
from hone.data.types import Trajectory
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore
from hone.rewards.score import Score

GAP = 1
"""Unsampled positions between two segments, without which two turns would merge into one."""


def is_split(batch: Batch) -> bool:
    """Return whether an episode of the batch has several segments."""
    return "part" in batch and bool((batch.tensor("part") > 0).any())


def join_segments(batch: Batch, columns: Collection[str]) -> Batch:
    """Return one row per episode with these columns.

    A template that rewrites history gives an episode a row per segment; a group's mean counts the episode once, and a reward at its end
    reaches the turns of earlier segments. Token columns are the concatenated segments; other columns are those of the first segment.
    """
    rows = episode_rows(batch)
    first = batch.select(*(name for name in columns if name in batch)).reorder(
        [episode_row_ids[0] for episode_row_ids in rows]
    )
    joined_columns: dict[str, Column] = {}
    for name in first.names():
        column = batch[name]
        if isinstance(column, Ragged):
            joined_columns[name] = Ragged.from_rows(
                [_concatenated(column, segment_rows) for segment_rows in rows], column.values.dtype
            )
        elif name == "trajectory":
            segments = batch.objects("trajectory")
            joined_columns[name] = [
                _joined_trajectory([segments[row] for row in segment_rows]) for segment_rows in rows
            ]
    return first.with_columns(**joined_columns)


def split_column(column: Ragged, batch: Batch) -> Ragged:
    """Split a column of :func:`join_segments` into the rows of the batch."""
    lengths = batch.ragged("response_mask").lengths
    values_by_row: list[torch.Tensor] = [torch.empty(0)] * len(batch)
    for episode, segment_rows in enumerate(episode_rows(batch)):
        values, start = column.row(episode), 0
        for row in segment_rows:
            values_by_row[row] = values[start : start + int(lengths[row])]
            start += int(lengths[row]) + GAP
    return Ragged.from_rows(values_by_row, column.values.dtype)


def _concatenated(column: Ragged, rows: Sequence[int]) -> torch.Tensor:
    gap = column.values.new_zeros(GAP)
    spans = [span for row in rows for span in (gap, column.row(row))]
    return torch.cat(spans[1:])


def _joined_trajectory(segments: Sequence[Trajectory]) -> Trajectory:
    """Join segments into one trajectory; each further segment follows its prompt."""
    if len(segments) == 1:
        return segments[0]
    ids, mask = list(segments[0].response_ids), list(segments[0].response_mask)
    for segment in segments[1:]:
        ids += [*segment.prompt_ids, *segment.response_ids]
        mask += [0] * len(segment.prompt_ids) + segment.response_mask
    return dataclasses.replace(segments[0], response_ids=ids, response_mask=mask)


COLUMNS = {
    "groups": "uid",
    "values": "values",
    "process_rewards": "process_rewards",
    "greedy_baseline": "reward_baselines",
    "old_log_probs": "old_log_probs",
    "sum_pi_squared": "sum_pi_squared",
    "rollout_is_weights": "rollout_is_weights",
    "reward_components": "score",
    "turns": "response_mask",
    "turn_groups": "trajectory",
    "turn_values": "turn_values",
    "turn_baselines": "turn_baselines",
    "turn_roles": "trajectory",
}
"""Inputs that an estimator may need, with the column of each."""


def needed_columns(estimator: AdvantageEstimator) -> tuple[str, ...]:
    """Return the columns that the advantages require."""
    return ("token_level_rewards", *(COLUMNS[need] for need in sorted(estimator.needs)))


def suppliers(estimator: AdvantageEstimator) -> str:
    """Return the settings that provide the estimator's inputs, for an error message."""
    return "; ".join(INPUTS[need][1] for need in sorted(estimator.needs) if need not in ("groups", "old_log_probs"))


def estimate(estimator: AdvantageEstimator, batch: Batch, algorithm: AlgorithmConfig) -> tuple[Ragged, Ragged]:
    """Return advantages and returns of the batch, aligned with ``response_mask``; each episode counts once.

    The segments of an episode are joined before. An option of the estimator has the value of the key of the same name under
    ``algorithm``, or in ``algorithm.adv_kwargs``. With ``top_entropy_share`` the other tokens have advantage 0.
    """
    advantages, returns = _estimate(estimator, batch, algorithm)
    if algorithm.top_entropy_share is not None:
        learnt, _ = undecided_tokens(batch, algorithm.top_entropy_share)
        advantages = advantages.with_values(torch.where(learnt, advantages.values, 0))
    return advantages, returns


def undecided_tokens(batch: Batch, share: float) -> tuple[Tensor, float]:
    """Mark the share of the sampled tokens with the largest entropy, ``[N]``; return the least of these entropies too."""
    return largest_share(batch.ragged("entropy").values, batch.ragged("response_mask").values, share)


def _estimate(estimator: AdvantageEstimator, batch: Batch, algorithm: AlgorithmConfig) -> tuple[Ragged, Ragged]:
    if is_split(batch):
        columns = {
            "response_mask",
            "token_level_rewards",
            *(COLUMNS[name] for name in estimator.needs | estimator.uses),
        }
        joined = _estimate(estimator, join_segments(batch, columns), algorithm)
        return split_column(joined[0], batch), split_column(joined[1], batch)
    mask = batch.ragged("response_mask")
    inputs = [name for name in estimator.needs | estimator.uses if COLUMNS[name] in batch]
    advantages, returns = estimator(
        batch.ragged("token_level_rewards").to_padded(),
        mask.to_padded(),
        **{INPUTS[name][0]: _input(name, batch, algorithm) for name in inputs},
        **estimator_options(estimator, algorithm),
    )
    return Ragged.from_padded(advantages, mask.lengths), Ragged.from_padded(returns, mask.lengths)


def estimator_options(estimator: AdvantageEstimator, algorithm: AlgorithmConfig) -> dict[str, Any]:
    """Return the configured options of an estimator; ``adv_kwargs`` takes precedence."""
    settings = vars(algorithm)
    return {name: settings[name] for name in estimator.options if name in settings} | algorithm.adv_kwargs


def reward_components(scores: Sequence[Score], keys: Sequence[str]) -> dict[str, Tensor]:
    """Return the terms ``keys`` of the scores, each ``[B]``; ``score`` is the reward. A missing score counts as 0.

    Raises:
        ConfigError: there are no keys, or a score lacks one.
    """
    terms_of = [{"score": score.quality} | score.terms for score in scores]
    valued = [terms.keys() for score, terms in zip(scores, terms_of, strict=True) if score.error is None]
    names, everywhere = sorted(set().union(*valued)), sorted(set.intersection(*map(set, valued)) if valued else ())
    where, fix = "algorithm.gdpo_reward_keys", f"algorithm.gdpo_reward_keys=[{','.join(everywhere)}]"
    if not keys:
        raise ConfigError(
            "algorithm.gdpo_reward_keys is empty",
            why="GDPO normalises each reward component separately",
            fix=fix,
            where=where,
        )
    for key in keys:
        lacking = sum(score.error is None and key not in terms for score, terms in zip(scores, terms_of, strict=True))
        if lacking:
            raise ConfigError(
                f"{lacking} of {len(scores)} scores have no term '{key}'; terms: {names}",
                why="each component is normalised separately, so every response needs its value",
                fix=f"return '{key}' for every response, or {fix}, the terms that all have",
                where=where,
            )
    return {key: torch.tensor([terms.get(key, 0.0) for terms in terms_of]) for key in keys}


def turn_ids(mask: Tensor) -> Tensor:
    """Return the turn index of each token, ``[B, T]``; a turn is a run of sampled tokens."""
    is_sampled = mask.bool()
    before = torch.nn.functional.pad(is_sampled, (1, 0))[:, :-1]
    return ((is_sampled & ~before).cumsum(-1) - 1).clamp(min=0)


def turn_baselines(batch: Batch, baselines: RoleBaselines) -> list[list[tuple[str, float]]]:
    """Take the episodes of a batch into the averages, in order; return role and average of each turn of every row's episode."""
    joined = join_segments(batch, {"token_level_rewards", "response_mask", "trajectory"})
    mask = joined.ragged("response_mask").to_padded()
    turns = Turns.from_ids(turn_ids(mask), mask)
    rewards = turns.sum(joined.ragged("token_level_rewards").to_padded()).tolist()
    column: list[list[tuple[str, float]]] = [[] for _ in range(len(batch))]
    for rows, trajectory, earned in zip(episode_rows(batch), joined.objects("trajectory"), rewards, strict=True):
        roles = roles_of(trajectory, len(earned))
        now = baselines.update(role_returns(earned, roles))
        for row in rows:
            column[row] = [(role, now[role]) for role in roles]
    return column


def roles_of(trajectory: Trajectory, turns: int) -> list[str]:
    """Return the role of each turn of an episode; one without roles has one, named after its data source."""
    log = trajectory.episode
    return (log and log.turn_roles) or [trajectory.sample.data_source] * turns


def turn_states(trajectory: Trajectory) -> list[tuple]:
    """Return a key of the state before each turn: the prompt, then also the environment's last tokens."""
    states, state, position = [], (trajectory.uid,), 0
    for sampled, run in itertools.groupby(trajectory.response_mask):
        length = len(list(run))
        if sampled:
            states.append(state)
        else:
            state = (trajectory.uid, *trajectory.response_ids[position : position + length])
        position += length
    return states


def _input(name: str, batch: Batch, algorithm: AlgorithmConfig) -> Any:
    inputs: dict[str, Callable[[], Any]] = {
        "groups": lambda: batch.objects("uid"),
        "greedy_baseline": lambda: batch.tensor("reward_baselines"),
        "reward_components": lambda: reward_components(batch.objects("score"), algorithm.gdpo_reward_keys),
        "turns": lambda: turn_ids(batch.ragged("response_mask").to_padded()),
        "turn_values": lambda: batch.objects("turn_values"),
        "turn_baselines": lambda: batch.objects("turn_baselines"),
        "turn_roles": lambda: [roles_of(t, len(t.response_mask)) for t in batch.objects("trajectory")],
        "turn_groups": lambda: [turn_states(trajectory) for trajectory in batch.objects("trajectory")],
    }
    return inputs[name]() if name in inputs else batch.ragged(COLUMNS[name]).to_padded()


KEPT = "kept_mask"
"""Column with 1 on tokens that the correction keeps in the loss."""


def correct(batch: Batch, algorithm: AlgorithmConfig, metrics: MetricStore) -> Batch:
    """Measure the gap between engine and trainer, and add the columns of the correction.

    The columns are ``kept_mask`` and, with ``rollout_is``, ``rollout_is_weights``. The response mask stays unchanged, since rewards
    and groups are of complete responses.

    Raises:
        ConfigError: all tokens are rejected.
    """
    settings = correction_settings(algorithm.rollout_correction)
    del settings["bypass_mode"], settings["loss_type"]
    mask = batch.ragged("response_mask")
    correction = rollout_correction(
        batch.ragged("old_log_probs").to_padded(),
        batch.ragged("rollout_log_probs").to_padded(),
        mask.to_padded(),
        **settings,
    )
    metrics.update(correction.metrics)
    if not correction.response_mask.any():
        raise ConfigError(
            f"rollout correction rejected all {int(mask.values.sum())} tokens of the batch",
            why="engine and trainer disagree on every response (see rollout_corr/* and training/rollout_probs_diff_*), or "
            "the bounds are too narrow; no token is left to train on",
            fix=f"use wider bounds than rollout_rs_threshold={settings['rollout_rs_threshold']}, or "
            "algorithm.rollout_correction.rollout_rs=null",
            where="algorithm.rollout_correction",
        )
    columns = {KEPT: Ragged.from_padded(correction.response_mask, mask.lengths)}
    if correction.weights is not None:
        columns["rollout_is_weights"] = Ragged.from_padded(correction.weights, mask.lengths)
    return batch.with_columns(**columns)


def update_view(batch: Batch, algorithm: AlgorithmConfig, *, n: int, seed: int, step: int) -> Batch:
    """Return the rows that the updates of this step learn from.

    Args:
        batch: :func:`~hone.trainers.algorithm.learnt_tokens` of the batch, with all columns.
        algorithm: config block ``algorithm``.
        seed: run seed; with the step it determines PF-PPO's sample.
    """
    if not algorithm.use_pf_ppo:
        return batch
    drawn = resample(
        batch.tensor("reward"),
        algorithm.pf_ppo.reweight_method,
        weight_pow=algorithm.pf_ppo.weight_pow,
        generator=torch.Generator().manual_seed(derive_seed(seed, "pf-ppo", step)),
    )
    # mini-batches are split by prompts: n drawn rows count as one prompt, so that every mini-batch keeps its size
    return batch.reorder(drawn).with_columns(uid=[str(index // n) for index in range(len(drawn))])
