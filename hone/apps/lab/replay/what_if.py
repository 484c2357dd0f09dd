"""Effects that another estimator, loss, clip, correction or normalisation would have had on a stored step.

Contribution of each token to an update: the chain from its advantage to its share of the gradient.

The derivative of the loss by the log-prob of a token is exact without the model, because a policy loss sees the model only through
log-probs. For a token with advantage A, correction w, ratio r and normaliser c,

    derivative = - A * w * r * passes * c  +  KL loss

`passes` is 1, 0 for a token that is clipped, or another factor of the loss (a truncated ratio, the ratio of a sequence). An entropy bonus
has no part in it: it acts on all tokens of the vocabulary. Nor has the balance loss of experts, which acts on routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import advantage_estimators, aggregate_loss, apply_kl_penalty, policy_losses
from hone.apps.lab.replay.stored import StoredStep, WeightGradients, require_stored_inputs
from hone.config.actor import ActorConfig
from hone.config.derived import OldLogProbs, RunSpec
from hone.config.tree import RLConfig
from hone.config.trust import run_config
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.seeding import derive_seed
from hone.errors import HoneError
from hone.insight.metrics import MetricStore
from hone.insight.run_files import read_metrics
from hone.trainers.algorithm import learnt_tokens, mini_batches
from hone.trainers.estimates import COLUMNS, KEPT, correct, estimate, update_view
from hone.training.objectives import PolicyObjective, Totals


@dataclass(frozen=True)
class TokenGradients:
    """Derivatives of a step's loss by the log-probs of its tokens, aligned with ``response_ids``."""

    gradient: Ragged  # the whole derivative, summed over the mini-batches of the first pass
    ratio: Ragged  # policy over old policy
    passes: Ragged  # factor of the loss beyond advantage, correction and ratio; 0 on clipped tokens
    normaliser: Ragged  # derivative of the aggregated loss by the token's loss
    kl: Ragged  # part of the KL loss
    loss: tuple[float, ...]

    @property
    def share(self) -> Ragged:
        """Absolute derivatives, as shares of their sum over the step."""
        size = self.gradient.values.abs()
        return self.gradient.with_values(size / size.sum().clamp(min=torch.finfo(size.dtype).tiny))


def token_gradients(view: Batch, config: RLConfig, step: int, log_probs: Ragged | None = None) -> TokenGradients:
    """Differentiate the loss of a step's first pass over its mini-batches.

    ``view`` has the rows and tokens that the update learns from, with ``advantages`` and, where the loss has them,
    ``old_log_probs``, ``ref_log_probs`` and ``rollout_is_weights``. ``step`` determines the mini-batches. Without ``log_probs`` of
    the policy they are the old ones, as at the first update of a step.
    """
    actor = config.actor_rollout_ref.actor
    current = view.ragged("old_log_probs") if log_probs is None else log_probs
    columns = {
        name: current.with_values(torch.zeros_like(current.values))
        for name in ("gradient", "passes", "normaliser", "kl")
    }
    losses = []
    for rows in first_pass(view.uids, config, step):
        mini, mine = view.reorder(rows), current.select(rows)
        parts = _derivatives(mini, mine, config, actor)
        losses.append(parts.pop("loss"))
        for name, values in parts.items():
            place = current.with_values(torch.arange(len(current.values))).select(rows).values
            columns[name].values[place] = values
    ratio = (current.values - view.ragged("old_log_probs").values).exp() * view.ragged("response_mask").values
    return TokenGradients(**columns, ratio=current.with_values(ratio), loss=tuple(float(loss) for loss in losses))


def first_pass(uids: Sequence[str], config: RLConfig, step: int) -> Iterator[Sequence[int]]:
    """Yield the rows of each mini-batch of a step's first pass."""
    actor, seed = config.actor_rollout_ref.actor, config.trainer.seed
    order = derive_seed(seed, "mini-batches", step - 1) if actor.shuffle else None
    yield from mini_batches(uids, actor.ppo_mini_batch_size, 1, order)


def _derivatives(mini: Batch, log_probs: Ragged, config: RLConfig, actor: ActorConfig) -> dict[str, Tensor]:
    """Return loss, gradient and factors of one mini-batch, end to end."""
    totals, correction = Totals.from_batch(mini), RunSpec(config).correction
    if totals.tokens == 0:
        zeros = torch.zeros_like(log_probs.values)
        return {"loss": zeros.sum(), **dict.fromkeys(("gradient", "passes", "normaliser", "kl"), zeros)}
    limit = config.data.max_response_length
    actor = replace(actor, entropy_coeff=0.0, entropy_target=None, router_aux_loss_coef=0.0)
    whole = PolicyObjective(actor, correction, max_response_length=limit)
    policy = PolicyObjective(replace(actor, use_kl_loss=False), correction, max_response_length=limit)
    if whole.needs_preparation:
        mini = whole.prepare(mini, log_probs)
    loss, gradient = _gradient(whole, mini, log_probs, totals)
    _, of_policy = _gradient(policy, mini, log_probs, totals) if actor.use_kl_loss else (loss, gradient)
    normaliser = _normaliser(mini, actor.loss_agg_mode, whole.scale, totals)
    weights = mini.ragged("rollout_is_weights").values if "rollout_is_weights" in mini else 1.0
    ratio = (log_probs.values - mini.ragged("old_log_probs").values).exp()
    plain = -mini.ragged("advantages").values * weights * ratio * normaliser
    passes = torch.where(plain == 0, 0.0, of_policy / torch.where(plain == 0, 1.0, plain))
    return {"loss": loss, "gradient": gradient, "passes": passes, "normaliser": normaliser, "kl": gradient - of_policy}


def _gradient(objective: PolicyObjective, mini: Batch, log_probs: Ragged, totals: Totals) -> tuple[Tensor, Tensor]:
    leaf = log_probs.values.detach().clone().requires_grad_()
    loss, _ = objective({"log_probs": log_probs.with_values(leaf)}, mini, totals)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def _normaliser(mini: Batch, mode: str, scale: float, totals: Totals) -> Tensor:
    mask = mini.ragged("response_mask")
    padded = torch.zeros_like(mask.to_padded(), dtype=torch.float32).requires_grad_()
    loss = aggregate_loss(
        padded,
        mask.to_padded().float(),
        mode,
        batch_num_tokens=totals.tokens,
        global_batch_size=totals.sequences,
        loss_scale_factor=scale,
    )
    (derivative,) = torch.autograd.grad(loss, padded)
    return Ragged.from_padded(derivative, mask.lengths).values


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
    view = update_view(learnt_tokens(batch), config.algorithm, n=rollout.n, seed=config.trainer.seed, step=stored.step)
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
