"""Policy losses: a per-token part that each method supplies, and the shared rest.

A method is composed of a ratio, a clip rule, a weight and an aggregation (:mod:`hone.algorithms.policy_losses.parts`). Its
per-token part maps ``[B, T]`` tensors to a :class:`TokenLoss`; masking, importance weights, aggregation and the names of
the metrics are :class:`PolicyLoss`'s.

**Micro-batches.** A loss over a mini-batch is the sum of the losses of its micro-batches, on every rank, if the counts of the
mini-batch are passed (see :func:`~hone.algorithms.aggregate.aggregate_loss`). Most methods need one token or one sequence at
a time. A few select tokens by comparing them across the batch. The selection must be made over the mini-batch, or the
split would change the training. Such a method therefore has a second, earlier part::

    loss = policy_losses.get("kl_cov")
    if loss.needs_preparation:                                     # once per mini-batch, with the rows of all ranks
        prepared = loss.prepare(old_log_probs, log_probs, advantages, response_mask, **options)
    for rows in micro_batches:                                     # constants [B, T] by name, split like any other column
        share, metrics = loss(..., prepared={name: x[rows] for name, x in prepared.items()}, **options)

Here ``log_probs`` are the mini-batch's under the policy just before this update, without gradient. In the first update after
the old log-probs were computed with the same weights, they *are* the old ones; in later updates they cost one forward
pass. Without preparation, the selection is made within the batch that is passed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor

from hone.algorithms.aggregate import aggregate_loss
from hone.algorithms.masked import where_mask, wide
from hone.algorithms.options import check_options, options_of
from hone.algorithms.policy_losses.parts import require
from hone.methods import COMPARES_ACROSS_MINI_BATCH
from hone.registry import Registry

COMMON_OPTIONS = frozenset({"clip_ratio_low", "clip_ratio_high", "clip_ratio_c"})
"""Options that a caller may always pass; a loss that does not use one never receives it."""

Prepared = dict[str, Tensor]
"""Per-token constants ``[B, T]`` by name, computed over the whole mini-batch."""


@dataclass
class TokenLoss:
    """Per-token part of a policy loss.

    Attributes:
        loss: ``[B, T]``, with gradient.
        ratio: policy / old policy as used in the loss, ``[B, T]``.
        statistics: further per-token numbers or flags ``[B, T]`` by name; each is reported as its mean over the mask.
    """

    loss: Tensor
    ratio: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss."""

    name: str  # first registered name
    # ``f(old_log_probs, log_probs, advantages, response_mask, **options) -> TokenLoss``. It receives zeros outside the
    # mask, a boolean mask, and float32 or better. With ``across_batch`` it also takes ``prepared=``.
    per_token: Callable[..., TokenLoss]
    formula: str  # formula of the per-token loss, in one line
    paper: str
    # ``f(old_log_probs, log_probs, advantages, response_mask, **options) -> Prepared``, the constants of the whole
    # mini-batch; None if every token or sequence is independent. A random selection also takes ``keys=``, see
    # :meth:`prepare`.
    across_batch: Callable[..., Prepared] | None = None

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """Return the options and their defaults, named as the configuration keys under ``actor_rollout_ref.actor``."""
        functions = [self.per_token] + ([self.across_batch] if self.across_batch else [])
        options = options_of(*functions)
        return {name: default for name, default in options.items() if name not in ("prepared", "keys")}

    @property
    def options(self) -> frozenset[str]:
        return frozenset(self.defaults)

    @property
    def needs_preparation(self) -> bool:
        return self.across_batch is not None

    def prepare(
        self,
        old_log_probs: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        keys: Tensor | None = None,
        **options: Any,
    ) -> Prepared:
        """Compute the constants of the whole mini-batch; empty for losses without any.

        Columns and options are those of :meth:`__call__`, for all rows of the mini-batch, over all ranks; no gradient is taken.
        ``keys [B, T]`` int64 determine random selections. They should not depend on computed log-probs, whose last bits differ
        with the split. None: the other columns determine them. The result is independent of the order of rows and of padding.
        """
        accepted = self._known_options(options)
        mask, old, new, adv = _selected(response_mask, old_log_probs, log_probs.detach(), advantages)
        return self._prepare(old, new, adv, mask, accepted, keys)

    def __call__(
        self,
        old_log_probs: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        loss_agg_mode: str = "token-mean",
        rollout_is_weights: Tensor | None = None,
        prepared: Prepared | None = None,
        batch_num_tokens: int | Tensor | None = None,
        global_batch_size: int | Tensor | None = None,
        loss_scale_factor: float | None = None,
        dp_size: int = 1,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``(loss, metrics)``.

        Args:
            old_log_probs: log-probs of the sampled tokens before this step's updates, ``[B, T]``; a constant.
            log_probs: log-probs of the sampled tokens under the trained policy, ``[B, T]``.
            advantages: ``[B, T]``; a constant.
            response_mask: ``[B, T]``; values outside it, NaN included, affect neither loss nor gradient.
            loss_agg_mode: see :func:`~hone.algorithms.aggregate.aggregate_loss`, also for the counts and ``dp_size``.
            rollout_is_weights: importance weights ``[B, T]`` that multiply the per-token loss; constants.
            prepared: result of :meth:`prepare` for the whole mini-batch, with the rows of this batch; computed from this
                batch if omitted.
            **options: options of this loss; ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c`` are always accepted.

        Returns:
            the scalar loss, and metrics ``actor/...`` without gradient: means over the mask (``actor/ratio/max`` is
            the largest ratio), so that token-weighted means over micro-batches give those of the mini-batch.

        Raises:
            ConfigError: an option is unknown or out of range.
            ValueError: the shapes differ.
        """
        accepted = self._known_options(options)
        mask, old, new, adv = _selected(response_mask, old_log_probs.detach(), log_probs, advantages.detach())
        if self.across_batch is not None:
            if prepared is None:
                prepared = self._prepare(old, new.detach(), adv, mask, accepted)
            accepted["prepared"] = prepared
        part = self.per_token(old, new, adv, mask, **_accepted(self.per_token, accepted))
        weighted = part.loss
        if rollout_is_weights is not None:
            weighted = weighted * where_mask(rollout_is_weights.detach(), mask).to(weighted.dtype)
        loss = aggregate_loss(
            weighted,
            mask,
            loss_agg_mode,
            batch_num_tokens=batch_num_tokens,
            global_batch_size=global_batch_size,
            loss_scale_factor=loss_scale_factor,
            dp_size=dp_size,
        )
        return loss, _metrics(part, old, new, mask)

    @torch.no_grad()
    def _prepare(
        self,
        old: Tensor,
        new: Tensor,
        adv: Tensor,
        mask: Tensor,
        options: dict[str, Any],
        keys: Tensor | None = None,
    ) -> Prepared:
        if self.across_batch is None:
            return {}
        return self.across_batch(old, new, adv, mask, **_accepted(self.across_batch, options | {"keys": keys}))

    def _known_options(self, options: dict[str, Any]) -> dict[str, Any]:
        """Return those of ``options`` that this loss uses; raise for unknown ones."""
        known = self.options
        check_options(f"policy loss '{self.name}'", options, known | COMMON_OPTIONS, where="actor_rollout_ref.actor")
        taken = {name: value for name, value in options.items() if name in known}
        _check_clips(**{name: value for name, value in taken.items() if name in COMMON_OPTIONS})
        return taken


def _check_clips(clip_ratio_low: float = 0.2, clip_ratio_high: float = 0.2, clip_ratio_c: float = 3.0) -> None:
    for side, value in (("clip_ratio_low", clip_ratio_low), ("clip_ratio_high", clip_ratio_high)):
        require(
            value >= 0,
            f"{side}={value} must not be negative",
            why="the on-policy ratio 1 would be outside the clip range",
            fix=f"actor_rollout_ref.actor.{side}=0.2",
        )
    require(
        clip_ratio_c > 1,
        f"clip_ratio_c={clip_ratio_c} must be above 1",
        why="every ratio above it is clipped, the on-policy ratio 1 included",
        fix="actor_rollout_ref.actor.clip_ratio_c=3.0",
    )


def _accepted(function: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    names = options_of(function)
    return {name: value for name, value in options.items() if name in names}


def _selected(response_mask: Tensor, *columns: Tensor) -> list[Tensor]:
    """Return the mask as booleans, and the columns in float32 or better with zeros outside it.

    Zeros before the loss: a NaN there would return through the gradient of exp.
    """
    for column in columns:
        if column.shape != response_mask.shape:
            raise ValueError(f"shape {tuple(column.shape)} does not match response_mask's {tuple(response_mask.shape)}")
    mask = response_mask.bool()
    return [mask, *(wide(where_mask(x, mask)) for x in columns)]


@torch.no_grad()
def _metrics(part: TokenLoss, old: Tensor, new: Tensor, mask: Tensor) -> dict[str, Tensor]:
    count = mask.sum().clamp(min=1)
    ratio = where_mask(part.ratio.detach(), mask)
    metrics = {
        "actor/ppo_kl": (old - new).sum() / count,
        "actor/ratio/mean": ratio.sum() / count,
        "actor/ratio/max": ratio.max() if ratio.numel() else ratio.sum(),
    }
    for name, value in part.statistics.items():
        metrics[f"actor/{name}"] = where_mask(value.detach(), mask).sum().to(ratio.dtype) / count
    return metrics


def _adopt(imported: Any, path: str) -> PolicyLoss:
    """Return the :class:`PolicyLoss` at an import path: a registered one, or a function used as its per-token part."""
    if isinstance(imported, PolicyLoss):
        return imported
    if not callable(imported):
        raise TypeError("expected a function of (old_log_probs, log_probs, advantages, response_mask, *, options)")
    per_token = cast("Callable[..., TokenLoss]", imported)
    summary = (inspect.getdoc(per_token) or "").partition("\n")[0]
    return PolicyLoss(path, per_token, summary, f"the user's own: {path}")


policy_losses: Registry[PolicyLoss] = Registry(
    "policy loss", key="actor_rollout_ref.actor.policy_loss.loss_mode", adopt=_adopt
)


def register_policy_loss(
    *names: str,
    formula: str,
    paper: str,
    across_batch: Callable[..., Prepared] | None = None,
) -> Callable[[Callable[..., TokenLoss]], PolicyLoss]:
    """Return a decorator that registers the per-token part of a loss (see :class:`PolicyLoss`) under ``names``."""

    if COMPARES_ACROSS_MINI_BATCH.get(names[0], across_batch is not None) != (across_batch is not None):
        raise ValueError(f"policy loss '{names[0]}': across_batch contradicts hone.methods.COMPARES_ACROSS_MINI_BATCH")

    def decorate(per_token: Callable[..., TokenLoss]) -> PolicyLoss:
        entry = PolicyLoss(names[0], per_token, formula, paper, across_batch)
        return policy_losses.register(*names)(entry)

    return decorate
