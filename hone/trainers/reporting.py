"""Metrics and records of a step: of the batch, of the updates, and the samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.config.reward import EpisodePricesConfig
from hone.data.batch import Batch, episode_rows
from hone.data.images import content_text
from hone.data.types import StopReason, Trajectory
from hone.insight.episode_metrics import episode_metrics
from hone.insight.metrics import MetricStore
from hone.insight.records import ScoreValues, trajectory_record
from hone.models.teacher import LOG_PROBS
from hone.rewards.score import Score
from hone.trainers.estimates import is_split

MOST_TERMS = 64
"""Named numbers of rewards that become metrics, those of most answers first; a function may name one a row."""


def batch_metrics(
    metrics: MetricStore,
    batch: Batch,
    *,
    max_prompt_length: int,
    max_response_length: int,
    prices: EpisodePricesConfig,
    left_out: Sequence[Trajectory] = (),
) -> None:
    """Add metrics of lengths, rewards, advantages, stop reasons, and the gap between engine and trainer.

    Args:
        metrics: store that receives them.
        batch: trained rows.
        max_prompt_length, max_response_length: limits in tokens.
        prices: prices of episodes of several turns.
        left_out: trajectories without a verdict, which count in the metrics of episodes and tools alone.
    """
    mask = batch.ragged("response_mask").values.bool()
    _spread(metrics, "prompt_length", batch.ragged("prompt_ids").lengths.float(), limit=max_prompt_length)
    _spread(metrics, "response_length", batch.ragged("response_ids").lengths.float(), limit=max_response_length)
    scores, first = batch.tensor("reward"), first_segments(batch)
    _spread(metrics, "critic/score", scores[first])
    _spread(metrics, "critic/rewards", episode_sums(batch, "token_level_rewards"))
    for name in ("advantages", "returns", "values", "process_rewards"):
        if name in batch:
            _spread(metrics, f"critic/{name}", batch.ragged(name).values[mask])
    if "values" in batch:
        values, returns = batch.ragged("values").values[mask], batch.ragged("returns").values[mask]
        metrics.add("critic/vf_explained_var", 1 - (returns - values).var() / (returns.var() + 1e-8))
    for name in ("entropy", "sum_pi_squared"):
        if name in batch:
            metrics.add(f"actor/{name}", batch.ragged(name).values[mask].mean())
    if LOG_PROBS in batch:
        metrics.add("distillation/teacher_mass", batch.ragged(LOG_PROBS).values[mask].exp().sum(-1).mean())
    if "reward_baselines" in batch:
        _spread(metrics, "critic/greedy_baseline", batch.tensor("reward_baselines"))
    episode_scores = [batch.objects("score")[row] for row in first]
    _reward_metrics(metrics, episode_scores, [batch.uids[row] for row in first], scores[first])
    _stop_metrics(metrics, batch.objects("trajectory"))
    played = [*batch.objects("trajectory"), *left_out]
    metrics.update(episode_metrics(played, [*scores.tolist(), *[None] * len(left_out)], prices))
    _mismatch_metrics(metrics, batch, mask)
    sizes, tokens = batch.ragged("support_sizes"), int(mask.sum())
    if sizes.values.any():
        ids = batch.ragged("support_ids").values
        metrics.add("rollout/support_tokens", len(ids) / tokens)
        metrics.add("rollout/support_bytes", (ids.nbytes + sizes.values.nbytes) / tokens)
    metrics.add(
        "perf/total_num_tokens",
        float(batch.ragged("prompt_ids").lengths.sum() + batch.ragged("response_ids").lengths.sum()),
    )


def age_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Return the share of sampled tokens by age in weight updates, and how far the policy has moved from each.

    Args:
        batch: with ``old_log_probs`` under the weights that are trained.
        version: version of these weights.
    """
    sampled = batch.ragged("response_mask").values.bool()
    ages = version - batch.ragged("token_versions").values[sampled]
    log_ratio = (batch.ragged("old_log_probs").values - batch.ragged("rollout_log_probs").values)[sampled].double()
    metrics = {"async/age/mean": float(ages.double().mean())}
    for age in ages.unique().tolist():
        ratio = log_ratio[ages == age]
        weights = ratio.exp()
        metrics |= {
            f"async/age_{age}/token_share": len(ratio) / len(ages),
            f"async/age_{age}/log_ratio_abs_mean": float(ratio.abs().mean()),
            f"async/age_{age}/effective_sample_share": float(weights.sum() ** 2 / (len(ratio) * (weights**2).sum())),
        }
    return metrics


def first_segments(batch: Batch) -> list[int]:
    """Return the first row of every episode, so that episode metrics count each episode once."""
    return [rows[0] for rows in episode_rows(batch)] if is_split(batch) else list(range(len(batch)))


def episode_sums(batch: Batch, name: str) -> Tensor:
    """Sum a token column over every episode, ``[episodes]``."""
    sums = batch.ragged(name).to_padded().sum(-1)
    if not is_split(batch):
        return sums
    return torch.stack([sums[rows].sum() for rows in episode_rows(batch)])


def sample_record(trajectory: Trajectory, score: Score) -> dict[str, Any]:
    """Return a scored sample as in the rollout archive."""
    return trajectory_record(trajectory, prompt_text=prompt_text(trajectory), **score_values(score))


def score_values(score: Score | None) -> ScoreValues:
    """Return the values of a record that come from the score; None before scoring."""
    if score is None:
        return {"score": None}
    return {
        "score": score.verdict,
        "unshaped": score.unshaped,
        "terms": score.terms,
        "extra": score.extra,
        "error": score.error,
        "cause": score.cause,
    }


def prompt_text(trajectory: Trajectory) -> str | None:
    """Return the contents of the prompt's messages; None if it has no messages."""
    messages = trajectory.sample.messages
    return None if messages is None else "\n".join(content_text(message["content"]) for message in messages)


def _spread(metrics: MetricStore, name: str, values: Tensor, limit: int | None = None) -> None:
    if len(values) == 0:
        return
    metrics.add(f"{name}/mean", values.mean())
    metrics.add(f"{name}/max", values.max())
    metrics.add(f"{name}/min", values.min())
    if limit is not None:
        metrics.add(f"{name}/clip_ratio", (values >= limit).float().mean())


def _reward_metrics(metrics: MetricStore, scores: Sequence[Score], uids: Sequence[str], rewards: Tensor) -> None:
    terms: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.terms.items():
            terms[name].append(value)
    for name, values in sorted(terms.items(), key=lambda term: -len(term[1]))[:MOST_TERMS]:
        metrics.add(f"reward/{name}/mean", sum(values) / len(values))
    if len(terms) > MOST_TERMS:
        metrics.add("reward/unlogged_terms", len(terms) - MOST_TERMS)
    groups: dict[str, set[float]] = defaultdict(set)
    for uid, reward in zip(uids, rewards.tolist(), strict=True):
        groups[uid].add(reward)
    if len(groups) < len(scores):
        metrics.add("reward/zero_std_group_ratio", sum(len(values) == 1 for values in groups.values()) / len(groups))


def _stop_metrics(metrics: MetricStore, trajectories: Sequence[Trajectory]) -> None:
    counts = Counter(trajectory.stop_reason for trajectory in trajectories)
    for reason in StopReason:
        if counts[reason] or reason in (StopReason.STOP, StopReason.LENGTH):
            metrics.add(f"rollout/stop_reason/{reason.value}", counts[reason] / len(trajectories))


def _mismatch_metrics(metrics: MetricStore, batch: Batch, mask: Tensor) -> None:
    trainer, engine = batch.ragged("old_log_probs").values[mask], batch.ragged("rollout_log_probs").values[mask]
    for name, gap in (("probs", trainer.exp() - engine.exp()), ("log_probs", trainer - engine)):
        metrics.add(f"training/rollout_{name}_diff_mean", gap.abs().mean())
        metrics.add(f"training/rollout_{name}_diff_max", gap.abs().max())
