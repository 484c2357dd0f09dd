"""What an update minimises: the policy objective, the value objective, and imitation.

Each returns a loss function for :meth:`hone.training.engine.TrainEngine.train_batch`. A micro-batch's loss is its share
of the mini-batch's, normalised by the mini-batch's totals. Statistics are written so that their token-weighted mean
over micro-batches is the value over the mini-batch.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hone.algorithms import PolicyLoss, aggregate_loss, kl_penalty, policy_losses, value_loss
from hone.config.actor import ActorConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.insight.invariants import RATIO_MAX, RATIO_MEAN
from hone.insight.metrics import MetricSpec, Reduction, declare, is_declared
from hone.training.correction import loss_name
from hone.training.engine import LossFn, Statistics, Totals, WholeBatch

PREPARED = "prepared/"
"""Beginning of the names of columns that a policy loss settled over the whole mini-batch."""


class PolicyObjective:
    """Policy loss - entropy_coeff x entropy + kl_loss_coef x KL(policy, reference).

    Reads columns ``advantages``, ``response_mask``, where there are ``old_log_probs`` and ``rollout_is_weights``, with
    use_kl_loss ``ref_log_probs``, and what :meth:`prepare` added. Without old log-probs the policy itself is the old one: the ratio
    is 1, and its gradient that of the log-probs.

    Args:
        actor: the block ``actor_rollout_ref.actor``.
        correction: every key of ``algorithm.rollout_correction``; the loss takes those that it has options for.
        max_response_length: divisor of seq-mean-token-sum-norm when the actor names none.

    Raises:
        ConfigError: no such policy loss, or it has no option of a name in ``loss_kwargs``.
    """

    def __init__(self, actor: ActorConfig, correction: dict[str, Any], *, max_response_length: int) -> None:
        self.actor = actor
        self.loss = policy_losses.get(loss_name(actor.policy_loss.loss_mode, correction))
        self.options = loss_options(self.loss, actor, correction)
        self.scale = actor.loss_scale_factor or max_response_length

    @property
    def needs_preparation(self) -> bool:
        """Whether the loss compares tokens across the mini-batch, so that :meth:`prepare` must come first."""
        return self.loss.needs_preparation

    def prepare(self, batch: Batch, log_probs: Ragged, whole: WholeBatch = lambda own: (own, range(len(own)))) -> Batch:
        """Add what the loss settles over a whole mini-batch.

        Args:
            batch: the mini-batch, or this rank's rows of it.
            log_probs: the policy's at this moment.
            whole: brings the rows of all ranks together (:meth:`TrainEngine.whole_batch`).
        """
        compared = batch.select("old_log_probs", "advantages", "response_mask").with_columns(log_probs=log_probs)
        everything, own = whole(compared)
        mask = everything.ragged("response_mask")
        prepared = self.loss.prepare(
            everything.ragged("old_log_probs").to_padded(),
            everything.ragged("log_probs").to_padded(),
            everything.ragged("advantages").to_padded(),
            mask.to_padded(),
            **self.options,
        )
        columns = {name: Ragged.from_padded(x, mask.lengths).select(list(own)) for name, x in prepared.items()}
        return batch.with_columns(**{f"{PREPARED}{name}": column for name, column in columns.items()})

    def __call__(self, outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        """A micro-batch's share of the loss, and its statistics."""
        actor, mask = self.actor, _padded(batch, "response_mask", outputs)
        log_probs = outputs["log_probs"].to_padded()
        old = _padded(batch, "old_log_probs", outputs) if "old_log_probs" in batch else log_probs.detach()
        aggregation = _aggregation(actor.loss_agg_mode, self.scale, totals)
        prepared = {
            n.removeprefix(PREPARED): _padded(batch, n, outputs) for n in batch.names() if n.startswith(PREPARED)
        }
        weights = _padded(batch, "rollout_is_weights", outputs) if "rollout_is_weights" in batch else None
        shares: dict[str, Tensor] = {}
        shares["actor/pg_loss"], metrics = self.loss(
            old,
            log_probs,
            _padded(batch, "advantages", outputs),
            mask,
            rollout_is_weights=weights,
            prepared=prepared or None,
            **self.options,
            **aggregation,
        )
        loss = shares["actor/pg_loss"]
        mode = aggregation.pop("loss_agg_mode")
        if actor.entropy_coeff > 0:
            shares["actor/entropy_loss"] = aggregate_loss(outputs["entropy"].to_padded(), mask, mode, **aggregation)
            loss = loss - actor.entropy_coeff * shares["actor/entropy_loss"]
        if actor.use_kl_loss:
            penalty = kl_penalty(log_probs, _padded(batch, "ref_log_probs", outputs), actor.kl_loss_type)
            shares["actor/kl_loss"] = aggregate_loss(penalty, mask, mode, **aggregation)
            metrics = {**metrics, "actor/kl_coef": actor.kl_loss_coef}
            loss = loss + actor.kl_loss_coef * shares["actor/kl_loss"]
        shares["actor/loss"] = loss
        for name in () if self.loss.name in policy_losses else metrics:
            if not is_declared(name):
                declare(
                    MetricSpec(name, "mean", Reduction.MEAN, f"A statistic of {self.loss.name}: mean over its tokens.")
                )
        return loss, _statistics(shares, metrics, mask, totals) | _ratio(log_probs, old, mask)


def loss_options(loss: PolicyLoss, actor: ActorConfig, correction: dict[str, Any]) -> dict[str, Any]:
    """The options of a loss as configured: each is the key of its name under ``actor``, ``actor.policy_loss`` or
    ``algorithm.rollout_correction``; what ``loss_kwargs`` names wins.
    """
    settings = correction | vars(actor) | vars(actor.policy_loss)
    for side in ("clip_ratio_low", "clip_ratio_high"):
        settings[side] = actor.clip_ratio if settings[side] is None else settings[side]
    return {name: settings[name] for name in loss.options if name in settings} | actor.policy_loss.loss_kwargs


def value_objective(*, cliprange_value: float, loss_agg_mode: str, loss_scale_factor: float) -> LossFn:
    """Clipped value loss. Reads columns ``values``, ``returns`` and ``response_mask``."""

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        predictions, mask = outputs["values"].to_padded(), _padded(batch, "response_mask", outputs)
        loss, metrics = value_loss(
            predictions,
            _padded(batch, "returns", outputs),
            _padded(batch, "values", outputs),
            mask,
            cliprange_value=cliprange_value,
            **_aggregation(loss_agg_mode, loss_scale_factor, totals),
        )
        return loss, _statistics({"critic/vf_loss": loss}, metrics, mask, totals)

    return objective


def imitation_objective() -> LossFn:
    """Mean negative log-likelihood of the tokens with ``response_mask`` 1."""

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        log_probs = outputs["log_probs"].values
        mask = batch.ragged("response_mask").values.to(log_probs)
        loss = -(log_probs * mask).sum() / totals.tokens
        return loss, _statistics({"train/loss": loss}, {}, mask, totals)

    return objective


def _padded(batch: Batch, name: str, outputs: dict[str, Ragged]) -> Tensor:
    device = next(iter(outputs.values())).values.device
    return batch.ragged(name).to(device).to_padded().float()


def _aggregation(mode: str, scale: float, totals: Totals) -> dict:
    return {
        "loss_agg_mode": mode,
        "batch_num_tokens": totals.tokens,
        "global_batch_size": totals.sequences,
        "loss_scale_factor": scale,
    }


def _statistics(shares: dict[str, Tensor], metrics: dict, mask: Tensor, totals: Totals) -> Statistics:
    tokens = float(mask.sum())
    if tokens == 0:
        return {}
    scale = totals.tokens / tokens
    result: Statistics = {name: (share.detach() * scale, tokens) for name, share in shares.items()}
    return result | {name: (value, tokens) for name, value in metrics.items()}


def _ratio(log_probs: Tensor, old: Tensor, mask: Tensor) -> Statistics:
    gap = (log_probs.detach() - old).abs() * mask
    tokens = float(mask.sum())
    if tokens == 0:
        return {}
    return {RATIO_MAX: (gap.max(), tokens), RATIO_MEAN: (gap.sum() / mask.sum(), tokens)}


def without_ratio(statistics: Statistics) -> Statistics:
    """Only what is a declared metric."""
    return {name: value for name, value in statistics.items() if name not in (RATIO_MAX, RATIO_MEAN)}
