"""Preference losses: learning from pairs of a better and a worse response, or from labelled responses.

A registered function receives whole responses only (sums of log-probs, one number per response). It returns one loss per
pair (or per response) and the implicit rewards. Summing tokens under the mask, pairing rows, normalising and naming
metrics happen here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import masked_mean, masked_sum, where_mask
from hone.algorithms.options import check_options, options_of
from hone.algorithms.preference_losses.pairs import pair_rows
from hone.errors import ConfigError
from hone.methods import PREFERENCE_LOSS_NEEDS
from hone.registry import Registry

KEY = "loss"
"""Configuration block of the options."""

NEEDS = {
    "pairs": "a chosen and a rejected response to every prompt (columns chosen and rejected)",
    "reference": "ref_log_probs of a frozen policy",
    "kl": "kl, the estimated KL to the reference policy (see kto_kl)",
}
"""Inputs that a loss may need, with a description."""

COUNTED_BY = {
    "rewards/chosen": "chosen",
    "logps/chosen": "chosen",
    "rewards/rejected": "rejected",
    "logps/rejected": "rejected",
    "rewards/accuracies_longer": "longer",
    "rewards/accuracies_shorter": "shorter",
}
"""Units that the mean of a metric is over; for others: pairs, or responses if there are none."""


@dataclass(frozen=True)
class Responses:
    """Whole responses, one number each."""

    log_probs: Tensor  # ``[N]``, sum over the response's tokens, with gradient
    lengths: Tensor  # ``[N]``, number of counted tokens, at least 1
    ref_log_probs: Tensor  # ``[N]``, the same sum under the reference policy; 0 for a loss without one

    @property
    def log_ratio(self) -> Tensor:
        return self.log_probs - self.ref_log_probs

    @property
    def mean_log_prob(self) -> Tensor:
        return self.log_probs / self.lengths

    def averaged(self) -> Responses:
        """Return the same responses with averages over tokens in place of sums."""
        return Responses(
            self.log_probs / self.lengths, torch.ones_like(self.lengths), self.ref_log_probs / self.lengths
        )

    def select(self, rows: Tensor) -> Responses:
        return Responses(self.log_probs[rows], self.lengths[rows], self.ref_log_probs[rows])


@dataclass
class PairLoss:
    """Loss of P pairs.

    Attributes:
        loss: ``[P]``, with gradient.
        chosen: implicit reward of the chosen responses, ``[P]``.
        rejected: implicit reward of the rejected ones, ``[P]``.
        statistics: further numbers ``[P]`` by metric name; their means are reported.
    """

    loss: Tensor
    chosen: Tensor
    rejected: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class LabelLoss:
    """Loss of B single responses.

    ``loss`` has a gradient; a response counts as good if its implicit reward in ``rewards`` exceeds ``threshold``; each ``[B]``.
    """

    loss: Tensor
    rewards: Tensor
    threshold: Tensor


@dataclass(frozen=True)
class PreferenceLoss:
    """A registered preference loss: callable, with a declaration of its inputs."""

    name: str  # first registered name
    # ``f(chosen, rejected, **options) -> PairLoss`` or, for single responses, ``f(responses, labels, kl, **options) ->
    # LabelLoss``; responses are :class:`Responses`
    compute: Callable[..., Any]
    needs: frozenset[str]  # keys of :data:`NEEDS`
    options: frozenset[str]  # plain-number options, named as the configuration keys under ``loss``
    formula: str  # formula in one line
    paper: str

    def __call__(
        self,
        log_probs: Tensor,
        response_mask: Tensor,
        labels: Tensor,
        *,
        pair_ids: Sequence[Hashable] | Tensor | None = None,
        ref_log_probs: Tensor | None = None,
        kl: Tensor | float | None = None,
        global_batch_size: int | Tensor | None = None,
        dp_size: int = 1,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``(loss, metrics)``.

        Args:
            log_probs: log-probs of the response tokens under the trained policy, ``[B, T]``.
            response_mask: ``[B, T]``, 1 on tokens that count; values outside it, NaN included, affect neither loss nor
                gradient.
            labels: ``[B]``, true on chosen (desirable) responses.
            pair_ids: length B, equal on the two rows of a pair; None pairs the i-th chosen with the i-th rejected row.
            ref_log_probs: log-probs of the response tokens under the reference policy, ``[B, T]``; a constant.
            kl: estimated KL (see :func:`~hone.algorithms.preference_losses.direct.kto_kl`); a constant.
            global_batch_size: pairs (or single responses) of the whole mini-batch over all ranks; the losses of its
                micro-batches then add up to its loss. None: those of this batch.
            dp_size: data-parallel ranks whose gradients are averaged.
            **options: options of this loss.

        Returns:
            the scalar loss, a mean over pairs (or single responses), and metrics without gradient:
            ``rewards/chosen``, ``rewards/rejected`` (implicit rewards), ``rewards/accuracies`` (pairs in the right order,
            a tie counts half; for single responses: on the right side), ``logps/chosen``, ``logps/rejected`` (sums over
            tokens), with pairs ``rewards/margins``, and ``rewards/accuracies_longer`` and ``_shorter`` of pairs whose chosen
            response is so. Each is a mean; :meth:`counts` returns the number of values in it.
            Responses without tokens, and their pairs, are ignored.

        Raises:
            ConfigError: a needed input is missing, or an option is unknown or out of bounds.
            DataError: the rows do not form pairs.
            ValueError: ``dp_size > 1`` without ``global_batch_size``.
        """
        self._check(options, reference=ref_log_probs is not None, kl=kl is not None)
        if dp_size > 1 and global_batch_size is None:
            raise ValueError(f"with dp_size={dp_size} the loss needs global_batch_size over all ranks")
        labels = labels.bool()
        responses = _responses(log_probs, ref_log_probs if "reference" in self.needs else None, response_mask)
        present = response_mask.bool().any(-1)
        if "pairs" in self.needs:
            loss, valid, metrics = self._of_pairs(responses, present, labels, pair_ids, options)
        else:
            loss, valid, metrics = self._of_labels(responses, present, labels, kl, options)
        units = valid.sum() if global_batch_size is None else global_batch_size
        units = units.clamp(min=1) if isinstance(units, Tensor) else max(units, 1)
        return masked_sum(loss, valid) / units * dp_size, metrics

    def counts(
        self, response_mask: Tensor, labels: Tensor, pair_ids: Sequence[Hashable] | Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the numbers of ``units`` (pairs, or single responses), of ``chosen`` and ``rejected`` responses, and of pairs whose
        chosen response is ``longer`` or ``shorter``.

        With :data:`COUNTED_BY` they are the weights for averaging metrics of micro-batches.
        """
        labels, present = labels.bool(), response_mask.bool().any(-1)
        if "pairs" in self.needs:
            chosen, rejected = pair_rows(labels, pair_ids)
            valid, lengths = present[chosen] & present[rejected], response_mask.bool().sum(-1)
            pairs, more = valid.sum(), lengths[chosen] - lengths[rejected]
            by_length = {"longer": (valid & (more > 0)).sum(), "shorter": (valid & (more < 0)).sum()}
            return {"units": pairs, "chosen": pairs, "rejected": pairs, **by_length}
        return {"units": present.sum(), "chosen": (present & labels).sum(), "rejected": (present & ~labels).sum()}

    def _of_pairs(
        self, responses: Responses, present: Tensor, labels: Tensor, pair_ids: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        chosen, rejected = pair_rows(labels, pair_ids)
        part: PairLoss = self.compute(responses.select(chosen), responses.select(rejected), **options)
        valid = present[chosen] & present[rejected]
        numbers = {
            "rewards/chosen": part.chosen,
            "rewards/rejected": part.rejected,
            "rewards/margins": part.chosen - part.rejected,
            "rewards/accuracies": _right(part.chosen - part.rejected),
            "logps/chosen": responses.log_probs[chosen],
            "logps/rejected": responses.log_probs[rejected],
            **part.statistics,
        }
        metrics = {name: masked_mean(value.detach(), valid) for name, value in numbers.items()}
        more, right = (
            responses.lengths[chosen] - responses.lengths[rejected],
            _right(part.chosen - part.rejected).detach(),
        )
        for name, rows in (("longer", more > 0), ("shorter", more < 0)):
            metrics[f"rewards/accuracies_{name}"] = masked_mean(right, valid & rows)
        return part.loss, valid, metrics

    def _of_labels(
        self, responses: Responses, present: Tensor, labels: Tensor, kl: Any, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        constant = torch.as_tensor(kl, dtype=responses.log_probs.dtype, device=labels.device).detach()
        part: LabelLoss = self.compute(responses, labels, constant, **options)
        rewards, log_probs = part.rewards.detach(), responses.log_probs.detach()
        sides = {"chosen": present & labels, "rejected": present & ~labels}
        metrics = {f"rewards/{side}": masked_mean(rewards, rows) for side, rows in sides.items()}
        metrics |= {f"logps/{side}": masked_mean(log_probs, rows) for side, rows in sides.items()}
        signed = torch.where(labels, 1.0, -1.0) * (rewards - part.threshold.detach())
        metrics["rewards/accuracies"] = masked_mean(_right(signed), present)
        return part.loss, present, metrics

    def _check(self, options: dict[str, Any], *, reference: bool, kl: bool) -> None:
        for need, supplied in (("reference", reference), ("kl", kl)):
            if need in self.needs and not supplied:
                raise ConfigError(
                    f"preference loss '{self.name}' needs {NEEDS[need]}",
                    why=self.formula,
                    fix="pass it, or choose a loss without it, such as orpo, simpo or cpo",
                    where=f"{KEY}.name",
                )
        check_options(f"preference loss '{self.name}'", options, self.options, where=KEY)
        for option, value in options.items():
            if option == "beta" and not value > 0:
                raise ConfigError(f"beta={value} must be above 0", where=f"{KEY}.beta", fix=f"{KEY}.beta=0.1")
            if option == "label_smoothing" and not 0 <= value < 0.5:
                raise ConfigError(
                    f"label_smoothing={value} must be at least 0 and below 0.5",
                    why="it is the share of pairs whose order is wrong; at 0.5 the labels carry no information",
                    where=f"{KEY}.label_smoothing",
                    fix=f"{KEY}.label_smoothing=0.1",
                )


preference_losses: Registry[PreferenceLoss] = Registry("preference loss", key=f"{KEY}.name")


def register_preference_loss(
    *names: str, needs: Sequence[str] = (), formula: str, paper: str
) -> Callable[[Callable[..., Any]], PreferenceLoss]:
    """Return a decorator that registers ``compute`` (see :class:`PreferenceLoss`) under ``names``.

    Its keyword-only parameters are the options. The needs of built-in names come from
    :data:`hone.methods.PREFERENCE_LOSS_NEEDS` instead.
    """
    needed = PREFERENCE_LOSS_NEEDS.get(names[0], frozenset(needs))

    def decorate(compute: Callable[..., Any]) -> PreferenceLoss:
        loss = PreferenceLoss(names[0], compute, needed, frozenset(options_of(compute)), formula, paper)
        object.__setattr__(loss, "__doc__", compute.__doc__)
        return preference_losses.register(*names)(loss)

    return decorate


def _responses(log_probs: Tensor, ref_log_probs: Tensor | None, mask: Tensor) -> Responses:
    """Return sums over tokens in float32 at least: a sum of many bfloat16 numbers would lose the margin between two."""
    dtype = torch.promote_types(log_probs.dtype, torch.float32)
    sums = where_mask(log_probs, mask).to(dtype).sum(-1)
    ref = (
        torch.zeros_like(sums) if ref_log_probs is None else where_mask(ref_log_probs.detach(), mask).to(dtype).sum(-1)
    )
    return Responses(sums, mask.bool().sum(-1).clamp(min=1).to(dtype), ref)


def _right(margin: Tensor) -> Tensor:
    """Return 1 where the margin is positive and 0.5 at 0: a policy that equals its reference is not wrong."""
    return (margin > 0).to(margin.dtype) + 0.5 * (margin == 0).to(margin.dtype)
