"""One prompt of a stored step, followed from its tokens to the loss: what each stage made of it, and each token's part."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hone.apps.lab.replay.stored import StoredStep
from hone.apps.lab.replay.what_if import Recomputed, recompute
from hone.data.batch import Batch
from hone.errors import HoneError
from hone.insight.archive.read import open_archive
from hone.insight.run_files import read_metrics
from hone.rewards.score import Score
from hone.trainers.algorithm import Algorithm

COLUMNS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "values", "token_level_rewards", "advantages")
"""Columns of a token that are shown where the run has them."""


@dataclass(frozen=True)
class TracedStage:
    name: str
    says: str  # what it made of the prompt, in numbers
    about: str  # what the stage does


@dataclass(frozen=True)
class TracedSequence:
    index: int  # number of the answer in its group
    part: int  # segment of an answer whose history was rewritten, from 0
    score: float
    advantage: float  # mean over the tokens that the update learns from; 0.0 without any
    ratio: tuple[float, float] | None  # range of new over old probability; None if the step did not store new log-probs
    share: float  # of the step's gradient by log-probs
    text: str
    tokens: list[
        dict[str, Any]
    ]  # by response token: text, mask, columns, ratio, and derivative of the loss by its log-prob


@dataclass(frozen=True)
class PromptTrace:
    step: int
    uid: str
    prompt: str
    prompt_tokens: int
    loss: float  # of the step's mini-batches, averaged, at the weights before the step
    stages: list[TracedStage]
    sequences: list[TracedSequence]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def trace(stored: StoredStep, uid: str | None = None) -> PromptTrace:
    """Follow a prompt of a stored step; the first one with answers of different rewards without a ``uid``.

    Advantages and derivatives are computed again from what the run stored. The derivatives are those of the step's first pass over its
    mini-batches, at the weights before it.

    Raises:
        HoneError: the step has no such prompt, or its loss cannot be computed from what is stored.
    """
    batch, uids = stored.batch, stored.batch.uids
    rewards = batch.tensor("reward").tolist()
    by_uid: dict[str, list[int]] = {}
    for row, name in enumerate(uids):
        by_uid.setdefault(name, []).append(row)
    mixed = (name for name, rows in by_uid.items() if len({rewards[row] for row in rows}) > 1)
    uid = uid or next(mixed, uids[0])
    if uid not in by_uid:
        shown = ", ".join(list(by_uid)[:6])
        raise HoneError(
            f"step {stored.step} has no prompt '{uid}'",
            fix=f"--prompt with one of {shown}",
            code="E-runs",
            where="--prompt",
        )
    computed = recompute(stored, stored.config)
    archive = open_archive(stored.run)
    record = next(record for record in archive.records(stored.step) if record["uid"] == uid)
    texts = archive.vocabulary()
    sequences = [_sequence(batch, row, computed, texts) for row in by_uid[uid]]
    losses = computed.gradients.loss
    return PromptTrace(
        stored.step,
        uid,
        record["prompt"] or "",
        len(record["prompt_ids"] or ()),
        math.fsum(losses) / len(losses),
        list(_stages(stored, by_uid[uid], sequences, computed)),
        sequences,
    )


def _sequence(batch: Batch, row: int, computed: Recomputed, texts: list[str] | None) -> TracedSequence:
    columns = {name: batch.ragged(name).row(row).tolist() for name in COLUMNS if name in batch}
    ids, mask = batch.ragged("response_ids").row(row).tolist(), batch.ragged("response_mask").row(row).tolist()
    gradient, learnt = computed.token_gradient.row(row), computed.learnt.row(row).bool()
    ratios: torch.Tensor | None = None
    if "new_log_probs" in batch and "old_log_probs" in batch:
        ratios = (batch.ragged("new_log_probs").row(row) - batch.ragged("old_log_probs").row(row)).exp()
    tokens = [
        {
            "text": texts[token] if texts and 0 <= token < len(texts) else str(token),
            "mask": mask[place],
            **{name: values[place] for name, values in columns.items()},
            **({} if ratios is None else {"ratio": float(ratios[place])}),
            "derivative": float(gradient[place]),
        }
        for place, token in enumerate(ids)
    ]
    advantages = computed.advantages.row(row)[learnt]
    moved = None if ratios is None or not bool(learnt.any()) else ratios[learnt]
    return TracedSequence(
        int(batch.objects("trajectory")[row].index),
        int(batch.objects("trajectory")[row].part),
        batch.objects("score")[row].total,
        float(advantages.mean()) if len(advantages) else 0.0,
        None if moved is None else (float(moved.min()), float(moved.max())),
        float(gradient.abs().sum() / computed.token_gradient.values.abs().sum().clamp(min=1e-30)),
        batch.objects("trajectory")[row].text,
        tokens,
    )


def _stages(
    stored: StoredStep, rows: list[int], sequences: list[TracedSequence], computed: Recomputed
) -> Iterator[TracedStage]:
    """Yield the stages of the run's step, each with its numbers for the prompt where it has some."""
    config, batch = stored.config, stored.batch.reorder(rows)
    metrics = next((row for row in read_metrics(stored.run) if row["step"] == stored.step), {})
    lengths, scores = batch.ragged("response_ids").lengths.tolist(), [sequence.score for sequence in sequences]
    says = {
        "gen": f"{len(rows)} sequences of {min(lengths)} to {max(lengths)} tokens, at temperature "
        f"{config.actor_rollout_ref.rollout.temperature:g}",
        "reward": f"scores {min(scores):.4g} to {max(scores):.4g}, mean {sum(scores) / len(scores):.4g}{_terms(batch)}",
        "adv": f"advantages {min(s.advantage for s in sequences):.4g} to {max(s.advantage for s in sequences):.4g} by "
        f"{config.algorithm.adv_estimator}",
        "update_actor": f"{sum(s.share for s in sequences):.2%} of the step's gradient, from {_learnt(rows, computed)} of the "
        f"{int(computed.learnt.values.sum())} tokens; loss by {config.actor_rollout_ref.actor.loss_agg_mode}; clipped in the step: "
        f"{metrics.get('actor/pg_clipfrac', 0.0):.2%}",
    }
    pairs = {
        "old_log_prob": ("old_log_probs", "rollout_log_probs", "trainer's log-probs less the engine's"),
        "ref": ("old_log_probs", "ref_log_probs", "log-probs less the reference's"),
        "kl_in_reward": ("token_level_rewards", "token_level_scores", "rewards by token less the scores"),
        "update_critic": ("returns", "values", "targets less values"),
    }
    for name, (one, other, what) in pairs.items():
        if one in batch and other in batch:
            gap = (batch.ragged(one).values - batch.ragged(other).values)[batch.ragged("response_mask").values.bool()]
            says[name] = f"{what}: {float(gap.min()):.3g} to {float(gap.max()):.3g}" if len(gap) else "no sampled token"
    if "rollout_is_weights" in batch:
        weights = batch.ragged("rollout_is_weights").values
        says["rollout_corr"] = (
            f"weights {float(weights.min()):.4g} to {float(weights.max()):.4g}" if len(weights) else ""
        )
    elif "old_log_prob" in says:
        says["rollout_corr"] = "measured only"
    if "reward_baselines" in batch:
        says["gen_max"] = f"score of the greedy answer {float(batch.tensor('reward_baselines')[0]):.4g}"
    for stage in Algorithm.planned(config):
        if stage.when:
            about = (inspect.getdoc(stage.run) or "").split("\n\n")[0]
            yield TracedStage(stage.name, says.get(stage.name, ""), " ".join(about.replace("``", "`").split()))


def _learnt(rows: list[int], computed: Recomputed) -> int:
    return int(sum(float(computed.learnt.row(row).sum()) for row in rows))


def _terms(batch: Batch) -> str:
    scores: list[Score] = batch.objects("score")
    names = sorted({name for score in scores for name in score.terms})[:4]
    means = [f"{name} {sum(score.terms.get(name, 0.0) for score in scores) / len(scores):.3g}" for name in names]
    return f" ({', '.join(means)})" if means else ""
