"""Contribution of each token to an update: the chain from its advantage to its share of the gradient.

The derivative of the loss by the log-prob of a token is exact without the model, because a policy loss sees the model only through
log-probs. For a token with advantage A, correction w, ratio r and normaliser c,

    derivative = - A * w * r * passes * c  +  KL loss

`passes` is 1, 0 for a token that is clipped, or another factor of the loss (a truncated ratio, the ratio of a sequence). An entropy bonus
has no part in it: it acts on all tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hone.algorithms import aggregate_loss
from hone.cluster.dispatch import mini_batches
from hone.config.actor import ActorConfig
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.data.seeding import derive_seed
from hone.training.objectives import PolicyObjective
from hone.training.updates import Totals

FACTOR_KEYS = {
    "advantages": "algorithm.adv_estimator",
    "rollout_is_weights": "algorithm.rollout_correction",
    "ratio": "actor_rollout_ref.actor.ppo_epochs",
    "passes": "actor_rollout_ref.actor.policy_loss.loss_mode",
    "normaliser": "actor_rollout_ref.actor.loss_agg_mode",
    "kl": "actor_rollout_ref.actor.kl_loss_coef",
}
"""Configuration key that decides each factor of the chain."""


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
    whole = PolicyObjective(replace(actor, entropy_coeff=0.0), correction, max_response_length=limit)
    policy = PolicyObjective(
        replace(actor, entropy_coeff=0.0, use_kl_loss=False), correction, max_response_length=limit
    )
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
