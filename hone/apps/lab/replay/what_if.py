"""Effects that another estimator, loss, clip, correction or normalisation would have had on a stored step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import advantage_estimators, apply_kl_penalty, policy_losses
from hone.apps.lab.replay.direction import WeightGradients
from hone.apps.lab.replay.stored import StoredStep, require_stored_inputs
from hone.apps.lab.replay.token_gradients import TokenGradients, token_gradients
from hone.config.derived import OldLogProbs, RunSpec
from hone.config.tree import RLConfig
from hone.config.trust import run_config
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import HoneError
from hone.insight.metrics import MetricStore
from hone.insight.run_files import read_metrics
from hone.trainers.estimates import COLUMNS, estimate
from hone.trainers.update_view import KEPT, correct, update_view

DERIVED = frozenset({"advantages", "returns", "rollout_is_weights", KEPT, "token_level_rewards", "new_log_probs"})
"""Columns of a step that are computed again."""
ROW = "row"
"""Column with the number of each row, which the mini-batches keep."""


@dataclass(frozen=True)
class Recomputed:
    """Advantages and derivatives that a configuration makes of a step."""

    advantages: Ragged  # aligned with ``response_ids``
    gradients: TokenGradients  # derivatives of the loss of the rows that the update learns from
    # derivatives, aligned with ``response_ids`` of the whole batch; 0 on tokens that it does not learn from
    token_gradient: Ragged
    learnt: Ragged  # 1 on tokens that the update learns from, aligned likewise

    @property
    def clipped(self) -> float:
        """Share of the learnt tokens with an advantage whose derivative is 0."""
        moved = (self.advantages.values != 0) & self.learnt.values.bool()
        return float((self.token_gradient.values[moved] == 0).float().mean()) if bool(moved.any()) else 0.0

    @property
    def effective_share(self) -> float:
        """Effective number of tokens in the derivatives, as a share of the learnt tokens: 1 if all weigh the same."""
        size = self.token_gradient.values.abs().double()
        tokens = int(self.learnt.values.sum())
        return float(size.sum() ** 2 / (size**2).sum() / tokens) if tokens and bool(size.any()) else 0.0


@dataclass(frozen=True)
class Comparison:
    """A changed step next to the actual one."""

    name: str
    missing: str | None = None  # why the step cannot be computed so, or None. The numbers mean nothing then
    loss: float = 0.0  # of the first mini-batch
    advantage: float = 0.0  # mean absolute advantage of the learnt tokens
    turned: float = 0.0  # share of the sequences whose advantage has the other sign
    clipped: float = 0.0  # see :class:`Recomputed`
    effective_share: float = 0.0
    cosine: float = 0.0  # of the derivatives by log-probs, with the actual ones
    direction: float | None = None  # cosine of the gradients by parameters, with the actual one; None without weights


def recompute(stored: StoredStep, config: RLConfig) -> Recomputed:
    """Compute advantages and derivatives of a stored step under a configuration."""
    _require_policy_loss(config)
    batch = stored.batch.select(*(name for name in stored.batch.names() if name not in DERIVED))
    batch = batch.with_columns(**{ROW: torch.arange(len(batch))})
    spec = RunSpec(config)
    if "old_log_probs" not in batch:
        raise _lacks("old_log_probs", "the log-probs of the trainer")
    if spec.old_log_probs.value is OldLogProbs.ENGINE:
        batch = batch.with_columns(old_log_probs=batch.ragged("rollout_log_probs"))
    if spec.old_log_probs.value is not OldLogProbs.UPDATE_PASS:
        batch = correct(batch, config.algorithm, MetricStore())
    batch = batch.with_columns(token_level_rewards=_rewards(stored, batch, config))
    estimator = advantage_estimators.get(config.algorithm.adv_estimator)
    for need in sorted(estimator.needs):
        if COLUMNS[need] not in batch:
            raise _lacks(COLUMNS[need], f"algorithm.adv_estimator={config.algorithm.adv_estimator}")
    advantages, returns = estimate(estimator, batch, config.algorithm)
    batch = batch.with_columns(advantages=advantages, returns=returns)
    if config.actor_rollout_ref.actor.use_kl_loss and "ref_log_probs" not in batch:
        raise _lacks("ref_log_probs", "actor_rollout_ref.actor.use_kl_loss=true")
    rollout = config.actor_rollout_ref.rollout
    view = update_view(batch, config.algorithm, n=rollout.n, seed=config.trainer.seed, step=stored.step)
    gradients = token_gradients(view, config, stored.step)
    rows = view.tensor(ROW)
    whole = batch.ragged("response_ids")
    place = whole.with_values(torch.arange(len(whole.values))).select(rows).values
    token_gradient = torch.zeros(len(whole.values)).index_add_(0, place, gradients.gradient.values)
    learnt = torch.zeros(len(whole.values)).index_put_((place,), view.ragged("response_mask").values.float())
    return Recomputed(advantages, gradients, whole.with_values(token_gradient), whole.with_values(learnt))


@dataclass(frozen=True)
class WhatIf:
    """Result of :func:`what_if`."""

    actual: Recomputed  # the step as it was, computed again
    gap: float  # largest difference of its advantages from the stored ones; 0.0 means equal bit for bit
    compared: list[Comparison]  # the step itself, then each change
    exact: bool | None  # whether directions are those of all trained parameters; None without weights

    def as_json(self) -> dict[str, Any]:
        compared = [
            asdict(one) if one.missing is None else {"name": one.name, "missing": one.missing} for one in self.compared
        ]
        return {"advantage_gap": self.gap, "exact": self.exact, "compared": compared}


def what_if(
    stored: StoredStep, changes: Sequence[tuple[str, Sequence[str]]], weights: WeightGradients | None = None
) -> WhatIf:
    """Compare a stored step with what other configurations, each a name and overrides, make of it.

    Without ``weights``, those before the step, derivatives by log-probs alone are compared.
    """
    actual = recompute(stored, stored.config)
    gap = (actual.advantages.values - stored.batch.ragged("advantages").values).abs()
    direction = weights.gradient(actual.token_gradient) if weights else None
    compared = [replace(compare("the run", actual, actual), direction=None if weights is None else 1.0)]
    for name, overrides in changes:
        try:
            other = recompute(stored, run_config(stored.run, overrides))
        except HoneError as error:
            compared.append(Comparison(name, missing=error.what))
            continue
        line = compare(name, actual, other)
        if weights is not None and direction is not None:
            line = replace(line, direction=cosine(direction, weights.gradient(other.token_gradient)))
        compared.append(line)
    return WhatIf(actual, float(gap.max()), compared, None if weights is None else weights.exact)


def compare(name: str, actual: Recomputed, other: Recomputed) -> Comparison:
    learnt = other.learnt.values.bool()
    advantages = other.advantages.values[learnt]
    before, after = _by_sequence(actual.advantages), _by_sequence(other.advantages)
    return Comparison(
        name,
        loss=other.gradients.loss[0],
        advantage=float(advantages.abs().mean()) if len(advantages) else 0.0,
        turned=float((before.sign() * after.sign() < 0).float().mean()),
        clipped=other.clipped,
        effective_share=other.effective_share,
        cosine=cosine(actual.token_gradient.values, other.token_gradient.values),
    )


def cosine(one: Tensor, other: Tensor) -> float:
    """Return the cosine of two vectors; 0 if one of them is 0."""
    one, other = one.double(), other.double()
    norms = one.norm() * other.norm()
    return float(one @ other / norms) if float(norms) else 0.0


def every_method(config: RLConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield name and overrides of every registered estimator and policy loss."""
    for name in advantage_estimators:
        yield f"adv_estimator={name}", [f"algorithm.adv_estimator={name}"]
    for name in policy_losses:
        yield f"loss_mode={name}", [f"actor_rollout_ref.actor.policy_loss.loss_mode={name}"]


def _rewards(stored: StoredStep, batch: Batch, config: RLConfig) -> Ragged:
    """Return the rewards by token, with the KL penalty where the configuration has it."""
    scores = batch.ragged("token_level_scores")
    if not config.algorithm.use_kl_in_reward:
        return scores
    if "ref_log_probs" not in batch:
        raise _lacks("ref_log_probs", "algorithm.use_kl_in_reward=true")
    measured = next((row for row in read_metrics(stored.run) if row["step"] == stored.step), {})
    coefficient = measured.get("actor/reward_kl_penalty_coeff", config.algorithm.kl_ctrl.kl_coef)
    mask = batch.ragged("response_mask")
    rewards, _ = apply_kl_penalty(
        scores.to_padded(),
        batch.ragged("old_log_probs").to_padded(),
        batch.ragged("ref_log_probs").to_padded(),
        mask.to_padded(),
        coefficient,
        config.algorithm.kl_penalty,
    )
    return Ragged.from_padded(rewards, mask.lengths)


def _require_policy_loss(config: RLConfig) -> None:
    if config.actor_rollout_ref.actor.preference_loss.loss_mode is not None:
        raise HoneError(
            "the run trains on pairs of responses (actor_rollout_ref.actor.preference_loss)",
            why="their loss is not a sum over tokens",
            fix="a run with a policy loss",
            code="E-what-if",
        )
    require_stored_inputs(config, weights=False, code="E-what-if", fix="a run without it")


def _lacks(column: str, needs: str) -> HoneError:
    return HoneError(
        f"the step has no {column}, which {needs} needs",
        why="the run did not compute it, so nothing can be computed from it",
        fix="a run with a setting that computes it",
        code="E-what-if",
    )


def _by_sequence(advantages: Ragged) -> Tensor:
    return advantages.to_padded().sum(-1)
