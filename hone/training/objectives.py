"""Objectives of an update: policy, value, and imitation; and what an update gets and returns: totals, loss function, statistics.

Each is a loss function for :meth:`hone.training.backends.protocol.TrainBackend.train_batch`. A micro-batch's loss is its
share of the mini-batch's loss, normalised by the mini-batch's totals. The token-weighted mean of a statistic over
micro-batches is its value over the mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.algorithms import (
    PolicyLoss,
    aggregate_loss,
    distillation_token_loss,
    kl_penalty,
    masked_mean,
    policy_losses,
    value_loss,
)
from hone.algorithms.process_rewards import outcome_loss
from hone.config.actor import ActorConfig, policy_loss_name
from hone.config.distillation import AnswersDistillationConfig, DistillationConfig, TeacherConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.insight.invariants import MASKED_GRADIENT, RATIO_MAX, RATIO_MEAN
from hone.insight.metrics import MetricSpec, Reduction, declare, is_declared
from hone.models.teacher import SPANS


@dataclass(frozen=True)
class Totals:
    """Counts over a whole mini-batch. Every micro-batch normalises by them, so the division into micro-batches has no
    effect.
    """

    tokens: int  # response tokens with mask 1
    sequences: int  # rows with at least one such token

    @classmethod
    def from_batch(cls, batch: Batch) -> Totals:
        """Count column ``response_mask``."""
        mask = batch.ragged("response_mask")
        sums = torch.zeros(len(batch)).index_add_(
            0, torch.arange(len(batch)).repeat_interleave(mask.lengths), mask.values.float().cpu()
        )
        return cls(int(sums.sum()), int((sums > 0).sum()))


Statistics = dict[str, tuple[Tensor | float, float]]  # metric name to (value, weight) of one micro-batch

LossFn = Callable[[dict[str, Ragged], Batch, Totals], tuple[Tensor, Statistics]]
"""(outputs of the head, micro-batch, totals) to (this micro-batch's share of the loss, statistics)."""


class PartialLoss:
    """Loss function of a mini-batch that comes in parts.

    The loss of a part is normalised by the totals of the part. It is weighted by them, so that the gradients of all
    parts add up to those of the whole mini-batch, times a known factor. ``count``: function of totals that returns the
    number by which the loss is divided; None if it is a sum.
    """

    def __init__(self, loss_fn: LossFn, count: Callable[[Totals], int] | None) -> None:
        self._loss_fn, self._count = loss_fn, count
        self.statistics: list[Statistics] = []
        self._first = self._part = self._total = 0

    def begin_part(self, totals: Totals) -> None:
        if self._count is not None:
            self._part = self._count(totals)
            self._first = self._first or self._part
            self._total += self._part

    def __call__(self, outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        loss, statistics = self._loss_fn(outputs, batch, totals)
        return loss if self._count is None else loss * (self._part / self._first), statistics

    @property
    def scale(self) -> float:
        """Factor from the accumulated gradients to those of the mini-batch."""
        return self._first / self._total if self._total else 1.0


@dataclass(frozen=True)
class GatheredRows:
    """The rows of a mini-batch from all data-parallel ranks."""

    batch: Batch  # all rows, in the order of the ranks
    local: Sequence[int]  # indices of this rank's rows


GatherRows = Callable[[Batch], GatheredRows]  # function from this rank's rows to the rows of all ranks. Collective


@dataclass
class UpdateResult:
    """Result of one optimizer update."""

    grad_norm: float  # before clipping
    statistics: list[Statistics]  # of each micro-batch of all data-parallel ranks, in order
    applied: bool  # False if the gradient was not finite and the update was skipped
    loss_scale: float | None = None  # factor of the loss in the backward pass
    overflow: bool = False  # skipped because the scaled gradient left float16's range; the next scale is smaller


_FACTORS = (-7046029254386353131, -4417276706812531889)  # odd, so that multiplication modulo 2^64 is invertible


def token_keys(prompts: Ragged, responses: Ragged) -> Ragged:
    """Hash each response token by its row's prompt, its row's response and its position.

    Unlike log-probs, keys do not differ in their last bits between micro-batches or numbers of ranks. Returns int64
    values, aligned with ``responses``; equal for tokens of rows with equal text only.
    """
    row_hashes = _mixed(_row_hashes(prompts) * _FACTORS[1] + _row_hashes(responses))
    keys = _mixed(row_hashes.repeat_interleave(responses.lengths) + _positions(responses) * _FACTORS[0])
    return responses.with_values(keys)


def _row_hashes(column: Ragged) -> Tensor:
    """Return a hash of the tokens of each row and their order, ``[B]``."""
    tokens = _mixed(column.values.long() + _positions(column) * _FACTORS[1])
    rows = torch.arange(len(column)).repeat_interleave(column.lengths)
    return torch.zeros(len(column), dtype=torch.int64).index_add_(0, rows, tokens)


def _positions(column: Ragged) -> Tensor:
    return torch.arange(1, len(column.values) + 1) - column.offsets[:-1].repeat_interleave(column.lengths)


def _mixed(values: Tensor) -> Tensor:
    for factor in _FACTORS:
        values = values * factor
        values = values ^ (values >> 32)
    return values


PREPARED = "prepared/"  # name prefix of columns that a policy loss prepared over the whole mini-batch


def _single_rank(batch: Batch) -> GatheredRows:
    return GatheredRows(batch, range(len(batch)))


UPDATED_ENTROPY = "actor/updated_entropy"


def learns_entropy(actor: ActorConfig) -> bool:
    """Return whether the loss has an entropy bonus, of a constant weight or of one that follows a target."""
    return actor.entropy_coeff > 0 or actor.entropy_target is not None


class PolicyObjective:
    """Policy loss - :attr:`entropy_coeff` x entropy + kl_loss_coef x KL(policy, reference) + coef x distance from a teacher.

    With router_aux_loss_coef also that times the balance loss of the experts, a mean over sequences whatever the aggregation.

    Reads columns ``advantages`` and ``response_mask``; if present ``old_log_probs`` and ``rollout_is_weights``; with
    use_kl_loss ``ref_log_probs``; with a distance of sampled tokens ``teacher_log_probs``; and the columns of :meth:`prepare`.
    Without old log-probs the ratio is 1, with the gradient of the log-probs.

    Args:
        correction: all keys of ``algorithm.rollout_correction``; the loss uses those that are its options.
        max_response_length: divisor of seq-mean-token-sum-norm if the actor sets none.
        distillation: block ``distillation`` if the distance from a teacher is a loss; the policy loss then has ``task_weight``.

    Raises:
        ConfigError: the policy loss is unknown, or ``loss_kwargs`` has an unknown option.
    """

    def __init__(
        self,
        actor: ActorConfig,
        correction: dict[str, Any],
        *,
        max_response_length: int,
        distillation: DistillationConfig | None = None,
    ) -> None:
        self.actor, self.distillation, self.entropy_coeff = actor, distillation, actor.entropy_coeff
        self.loss = policy_losses.get(policy_loss_name(actor.policy_loss.loss_mode, correction))
        self.options = loss_options(self.loss, actor, correction)
        self.scale = actor.loss_scale_factor or max_response_length

    @property
    def needs_preparation(self) -> bool:
        """True if the loss compares tokens across the mini-batch and needs :meth:`prepare` first."""
        return self.loss.needs_preparation

    def prepare(self, batch: Batch, log_probs: Ragged, gather: GatherRows = _single_rank) -> Batch:
        """Add the columns that the loss computes over a whole mini-batch."""
        keys = token_keys(batch.ragged("prompt_ids"), batch.ragged("response_ids"))
        compared = batch.select("old_log_probs", "advantages", "response_mask").with_columns(
            log_probs=log_probs, keys=keys
        )
        gathered = gather(compared)
        rows = gathered.batch
        mask = rows.ragged("response_mask")
        prepared = self.loss.prepare(
            rows.ragged("old_log_probs").to_padded(),
            rows.ragged("log_probs").to_padded(),
            rows.ragged("advantages").to_padded(),
            mask.to_padded(),
            keys=rows.ragged("keys").to_padded(),
            **self.options,
        )
        local = list(gathered.local)
        columns = {name: Ragged.from_padded(x, mask.lengths).select(local) for name, x in prepared.items()}
        return batch.with_columns(**{f"{PREPARED}{name}": column for name, column in columns.items()})

    def __call__(self, outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        """Return a micro-batch's share of the loss, and its statistics."""
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
        if self.distillation is not None:
            loss = self.distillation.task_weight * loss
        mode = aggregation.pop("loss_agg_mode")
        if learns_entropy(actor):
            entropy = outputs["entropy"].to_padded()
            shares["actor/entropy_loss"] = aggregate_loss(entropy, mask, mode, **aggregation)
            loss = loss - self.entropy_coeff * shares["actor/entropy_loss"]
            measured = {UPDATED_ENTROPY: masked_mean(entropy.detach(), mask), "actor/entropy_coeff": self.entropy_coeff}
            metrics = {**metrics, **measured}
        if actor.use_kl_loss:
            penalty = kl_penalty(log_probs, _padded(batch, "ref_log_probs", outputs), actor.kl_loss_type)
            shares["actor/kl_loss"] = aggregate_loss(penalty, mask, mode, **aggregation)
            metrics = {**metrics, "actor/kl_coef": actor.kl_loss_coef}
            loss = loss + actor.kl_loss_coef * shares["actor/kl_loss"]
        if self.distillation is not None:
            distance, teacher_metrics = _distance(self.distillation, outputs, batch)
            shares["distillation/loss"] = aggregate_loss(distance, mask, mode, **aggregation)
            metrics = {**metrics, **teacher_metrics}
            loss = loss + self.distillation.coef * shares["distillation/loss"]
        if actor.router_aux_loss_coef > 0:
            balance = outputs["balance"].to_padded()
            shares["actor/balance_loss"] = aggregate_loss(balance, mask, "seq-mean-token-mean", **aggregation)
            loss = loss + actor.router_aux_loss_coef * shares["actor/balance_loss"]
        shares["actor/loss"] = loss
        for name in () if self.loss.name in policy_losses else metrics:
            if not is_declared(name):
                declare(
                    MetricSpec(name, "mean", Reduction.MEAN, f"A statistic of {self.loss.name}: mean over its tokens.")
                )
        masked = _masked_gradient(outputs["log_probs"].values, batch.ragged("response_mask").values)
        return loss, _statistics(shares, metrics, mask, totals) | ratio_to(log_probs, old, mask) | masked


DIVISORS: dict[str, Callable[[Totals], int] | None] = {
    "token-mean": lambda totals: totals.tokens,
    "token-sum": None,
    **dict.fromkeys(
        ("seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean"), lambda totals: totals.sequences
    ),
}
"""Number by which each aggregation divides the loss of a mini-batch; None for a sum."""


def loss_options(loss: PolicyLoss, actor: ActorConfig, correction: dict[str, Any]) -> dict[str, Any]:
    """Return the configured options of a loss.

    An option is the key of its name in ``actor``, ``actor.policy_loss`` or ``algorithm.rollout_correction``; ``loss_kwargs``
    wins. A side of the clip range that is null has the value of ``clip_ratio``.
    """
    settings = correction | vars(actor) | vars(actor.policy_loss)
    for side in ("clip_ratio_low", "clip_ratio_high"):
        settings[side] = actor.clip_ratio if settings[side] is None else settings[side]
    return {name: settings[name] for name in loss.options if name in settings} | actor.policy_loss.loss_kwargs


def value_objective(*, cliprange_value: float, loss_agg_mode: str, loss_scale_factor: float) -> LossFn:
    """Return the clipped value loss. It reads columns ``values``, ``returns`` and ``response_mask``."""

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


def outcome_objective(beta: float) -> LossFn:
    """Return the loss of a process reward model. It reads columns ``ref_log_probs``, ``returns`` (the outcome) and ``response_mask``."""

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        mask, outcomes = _padded(batch, "response_mask", outputs), _padded(batch, "returns", outputs)
        means = (outcomes * mask).sum(-1) / mask.sum(-1).clamp(min=1)
        loss, metrics = outcome_loss(
            outputs["log_probs"].to_padded(),
            _padded(batch, "ref_log_probs", outputs),
            mask,
            means,
            beta=beta,
            global_batch_size=totals.sequences,
        )
        rows = float(mask.any(-1).sum())
        return loss, {name: (value, rows) for name, value in metrics.items()}

    return objective


def imitation_objective(distillation: AnswersDistillationConfig | None = None) -> LossFn:
    """Return the mean negative log-likelihood of the tokens with ``response_mask`` 1.

    ``distillation``: if a teacher scored the answers; the loss is then ``task_weight`` times the negative
    log-likelihood plus ``coef`` times the mean distance from the teacher.
    """

    def objective(outputs: dict[str, Ragged], batch: Batch, totals: Totals) -> tuple[Tensor, Statistics]:
        log_probs = outputs["log_probs"].values
        mask = batch.ragged("response_mask").values.to(log_probs)
        loss = -(log_probs * mask).sum() / totals.tokens
        shares, metrics = {"train/loss": loss}, {}
        if distillation is not None:
            distance, metrics = _distance(distillation, outputs, batch)
            tokens = Ragged.from_padded(distance, batch.ragged("response_mask").lengths).values
            shares["distillation/loss"] = torch.where(mask > 0, tokens, 0).sum() / totals.tokens
            loss = distillation.task_weight * loss + distillation.coef * shares["distillation/loss"]
        return loss, _statistics(shares, metrics, mask, totals)

    return objective


def token_loss_options(distillation: TeacherConfig) -> dict[str, Any]:
    """Return the options of :func:`~hone.algorithms.distillation.distillation_token_loss`."""
    return {
        "beta": distillation.beta,
        "tail_bucket": distillation.tail_bucket,
        "log_prob_min_clamp": distillation.log_prob_min_clamp,
        "loss_max_clamp": distillation.loss_max_clamp,
    }


def _distance(
    distillation: TeacherConfig, outputs: dict[str, Ragged], batch: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the distance from the teacher at each token ``[B, T]``, and metrics of a micro-batch."""
    if "distance" not in outputs:
        log_probs, teacher = outputs["log_probs"].to_padded(), _padded(batch, "teacher_log_probs", outputs)
        options = token_loss_options(distillation)
        if SPANS in batch:  # a span's sum has no gradient in a token that the update leaves out
            mask = _padded(batch, "response_mask", outputs) > 0
            log_probs = torch.where(mask, log_probs, log_probs.detach())
            options["spans"] = batch.ragged(SPANS).to(log_probs.device).to_padded(-1)
        return distillation_token_loss(log_probs, teacher, distillation.loss_mode, **options), {}
    if "student_mass" not in outputs:
        return outputs["distance"].to_padded(), {}
    mask = _padded(batch, "response_mask", outputs)
    mass = (outputs["student_mass"].to_padded() * mask).sum() / mask.sum().clamp(min=1)
    return outputs["distance"].to_padded(), {"distillation/student_mass": mass}


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


def ratio_to(log_probs: Tensor, old: Tensor, mask: Tensor) -> Statistics:
    """Return how far the policy is from the one with the log-probs ``old``; empty without tokens."""
    gap = (log_probs.detach() - old).abs() * mask
    tokens = float(mask.sum())
    if tokens == 0:
        return {}
    return {RATIO_MAX: (gap.max(), tokens), RATIO_MEAN: (gap.sum() / mask.sum(), tokens)}


def _masked_gradient(log_probs: Tensor, mask: Tensor) -> Statistics:
    """Measure in the backward pass the largest gradient of the log-probs ``[N]`` of tokens with mask 0.

    The statistic is 0 until the backward pass has reached the log-probs.
    """
    if not log_probs.requires_grad:
        return {}
    masked = mask.to(log_probs.device) == 0
    largest = torch.zeros((), device=log_probs.device)

    def measure(gradient: Tensor) -> None:
        largest.copy_(torch.where(masked, gradient.abs(), 0.0).max())

    log_probs.register_hook(measure)
    return {MASKED_GRADIENT: (largest, float(masked.numel()))}
