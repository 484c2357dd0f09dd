"""What an update minimises: the policy objective, the value objective, and imitation.

Each returns a loss function for :meth:`hone.training.engine.TrainEngine.train_batch`. A micro-batch's loss is its share
of the mini-batch's, normalised by the mini-batch's totals. Statistics are written so that their token-weighted mean
over micro-batches is the value over the mini-batch.
"""

from __future__ import annotations

from torch import Tensor

from hone.algorithms import aggregate_loss, kl_penalty, policy_losses, value_loss
from hone.config.tree import ActorConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.insight.invariants import RATIO_MAX, RATIO_MEAN
from hone.training.engine import LossFn, Statistics, Totals


def policy_objective(actor: ActorConfig, *, max_response_length: int) -> LossFn:
    """Policy loss - entropy_coeff x entropy + kl_loss_coef x KL(policy, reference).

    Reads columns ``old_log_probs``, ``advantages``, ``response_mask`` and, with use_kl_loss, ``ref_log_probs``.
    """
    policy_loss = policy_losses.get(actor.policy_loss.loss_mode)
    low = actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low
    high = actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        log_probs, mask, old = (
            outputs["log_probs"].to_padded(),
            _padded(batch, "response_mask", outputs),
            _padded(batch, "old_log_probs", outputs),
        )
        aggregation = _aggregation(actor.loss_agg_mode, actor.loss_scale_factor or max_response_length, totals)
        shares: dict[str, Tensor] = {}
        shares["actor/pg_loss"], metrics = policy_loss(
            old,
            log_probs,
            _padded(batch, "advantages", outputs),
            mask,
            clip_ratio_low=low,
            clip_ratio_high=high,
            clip_ratio_c=actor.clip_ratio_c,
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
        return loss, _statistics(shares, metrics, mask, totals) | _ratio(log_probs, old, mask)

    return objective


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
