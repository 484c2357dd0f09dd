"""Policy losses: what a policy gradient step minimises.

A loss is composed of a log-ratio, a clip rule, an optional importance weight and an aggregation. A registered function
supplies only the per-token part and its statistics, as a :class:`TokenLoss`; :class:`PolicyLoss` does the rest, once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.aggregate import aggregate_loss
from hone.algorithms.masked import masked_mean, where_mask
from hone.errors import ConfigError, did_you_mean
from hone.registry import Registry

COMMON_OPTIONS = frozenset({"clip_ratio_low", "clip_ratio_high", "clip_ratio_c"})
"""Options that a caller may always pass; a loss that does not take one never sees it."""


@dataclass
class TokenLoss:
    """The per-token part of a policy loss.

    Attributes:
        loss: ``[B, T]``, with gradient.
        ratio: policy / old policy as the loss uses it, ``[B, T]``.
        statistics: further per-token numbers ``[B, T]`` by name; each is reported as its mean over the mask.
    """

    loss: Tensor
    ratio: Tensor
    statistics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PolicyLoss:
    """A registered policy loss.

    Attributes:
        name: first registered name.
        per_token: ``f(old_log_probs, log_probs, advantages, response_mask, **options) -> TokenLoss``.
        options: plain-number options it takes, named as the configuration keys under ``actor_rollout_ref.actor``.
        formula: of the per-token loss, in one line.
        paper: where it comes from.
    """

    name: str
    per_token: Callable[..., TokenLoss]
    options: frozenset[str]
    formula: str
    paper: str

    def __call__(
        self,
        old_log_probs: Tensor,
        log_probs: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        *,
        loss_agg_mode: str = "token-mean",
        rollout_is_weights: Tensor | None = None,
        batch_num_tokens: int | Tensor | None = None,
        global_batch_size: int | Tensor | None = None,
        loss_scale_factor: float | None = None,
        dp_size: int = 1,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ``(loss, metrics)``.

        Args:
            old_log_probs: of the sampled tokens before this step's updates, ``[B, T]``; a constant.
            log_probs: of the sampled tokens under the policy that is trained, ``[B, T]``.
            advantages: ``[B, T]``; a constant.
            response_mask: ``[B, T]``; what stands outside it, NaN included, reaches neither loss nor gradient.
            loss_agg_mode: see :func:`~hone.algorithms.aggregate.aggregate_loss`, also for the counts and ``dp_size``.
            rollout_is_weights: importance weights ``[B, T]`` that multiply the per-token loss; constants.
            **options: of this loss; ``clip_ratio_low``, ``clip_ratio_high``, ``clip_ratio_c`` are always accepted.

        Returns:
            the scalar loss, and metrics ``actor/...`` without gradient: means over the mask (``actor/ratio/max`` is
            the largest ratio), so that token-weighted means over micro-batches give those of the mini-batch.

        Raises:
            ConfigError: an option is unknown.
        """
        for option in options:
            if option not in self.options | COMMON_OPTIONS:
                raise ConfigError(
                    f"policy loss '{self.name}' has no option '{option}'",
                    fix=did_you_mean(option, self.options | COMMON_OPTIONS),
                    where="actor_rollout_ref.actor",
                )
        # zero outside the mask on the way in: a NaN there would come back through the gradient of exp
        old, new, adv = (where_mask(x, response_mask) for x in (old_log_probs.detach(), log_probs, advantages.detach()))
        taken = {name: value for name, value in options.items() if name in self.options}
        part = self.per_token(old, new, adv, response_mask, **taken)
        weighted = (
            part.loss
            if rollout_is_weights is None
            else part.loss * where_mask(rollout_is_weights, response_mask).detach()
        )
        loss = aggregate_loss(
            weighted,
            response_mask,
            loss_agg_mode,
            batch_num_tokens=batch_num_tokens,
            global_batch_size=global_batch_size,
            loss_scale_factor=loss_scale_factor,
            dp_size=dp_size,
        )
        with torch.no_grad():
            statistics = {"ppo_kl": old - new, "ratio/mean": part.ratio, **part.statistics}
            metrics = {
                f"actor/{name}": masked_mean(value.detach(), response_mask) for name, value in statistics.items()
            }
            largest = where_mask(part.ratio.detach(), response_mask)
            metrics["actor/ratio/max"] = largest.max() if largest.numel() else largest.sum()
        return loss, metrics


policy_losses: Registry[PolicyLoss] = Registry("policy loss", key="actor_rollout_ref.actor.policy_loss.loss_mode")


def register_policy_loss(*names: str, formula: str, paper: str) -> Callable[[Callable[..., TokenLoss]], PolicyLoss]:
    """Return a decorator that registers the per-token part of a loss (see :class:`PolicyLoss`) under ``names``."""

    def decorate(per_token: Callable[..., TokenLoss]) -> PolicyLoss:
        parameters = inspect.signature(per_token).parameters.values()
        options = frozenset(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        return policy_losses.register(*names)(PolicyLoss(names[0], per_token, options, formula, paper))

    return decorate
