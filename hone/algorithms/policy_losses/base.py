"""Policy losses: a per-token part that each method supplies, and the shared rest.

A method is composed of a ratio, a clip rule, a weight and an aggregation. Its per-token part maps ``[B, T]`` tensors that are 0
outside the mask to a :class:`TokenLoss`; masking, importance weights, aggregation and the names of the metrics are
:class:`PolicyLoss`'s. After it come the ratios and clip rules, then PPO's clip, the soft gate that replaces it, and the losses of the
ratio of a whole sequence.

**Micro-batches.** A loss over a mini-batch is the sum of the losses of its micro-batches, on every rank, if the counts of the
mini-batch are passed (see :func:`~hone.algorithms.masked.aggregate_loss`). Most methods need one token or one sequence at
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

from hone.algorithms.masked import aggregate_loss, where_mask, wide
from hone.algorithms.options import check_options, options_of
from hone.errors import ConfigError
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
            loss_agg_mode: see :func:`~hone.algorithms.masked.aggregate_loss`, also for the counts and ``dp_size``.
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


LOG_RATIO_LIMIT = 20.0
"""Limit of the size of log-ratios before every exponential, in every loss, so that none overflows."""

# ------------------------------------------------------------------------------------------------------------- ratios


def clamped_log_ratio(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return ``log(policy / old policy)`` of each token, clamped to +-20; no gradient where it is clamped."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def token_ratio(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """Return policy / old policy at each token; the log-ratio is clamped to +-20 so that the exponential is finite."""
    return torch.exp(clamped_log_ratio(old_log_probs, log_probs))


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over the selected tokens of each row, ``[B, 1]``; 0 for empty rows. ``values`` are 0 outside the mask."""
    return values.sum(dim=-1, keepdim=True) / mask.sum(dim=-1, keepdim=True).clamp(min=1)


def sequence_ratio(old_log_probs: Tensor, log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the length-normalised ratio of the whole sequence (GSPO, eq. 7) at each of its tokens.

    The value is the geometric mean of the row's token ratios. The gradient of an entry reaches its token only
    (GSPO-token, eq. 14), so that a token-level advantage affects its token only. If all tokens of a row have the same
    advantage, the gradients of a row add up to those of the sequence ratio.
    """
    mean = row_mean((log_probs - old_log_probs).detach(), mask)
    log_ratio = mean + (log_probs - log_probs.detach())
    return torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


# --------------------------------------------------------------------------------------------------------- clip rules


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Return PPO's pessimistic loss ``max(-A r, -A clip(r, 1 - low, 1 + high))``, and where the clip is active (bool)."""
    free, clipped = -advantages * ratio, -advantages * ratio.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(free, clipped), clipped > free


def dual_clip(loss: Tensor, advantages: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Limit the loss of tokens with a negative advantage to ``-A bound``; also return where it is active (bool)."""
    ceiling = -advantages * bound
    active = (advantages < 0) & (loss > ceiling)
    return torch.where(active, ceiling, loss), active


def beyond_trust_region(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return the tokens that already moved in the direction of their advantage, where PPO's clip can act (bool)."""
    return ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))


def by_sign(advantages: Tensor, positive: float, otherwise: float) -> Tensor:
    """Return ``positive`` where the advantage is above 0, ``otherwise`` elsewhere."""
    return torch.full_like(advantages, otherwise).masked_fill_(advantages > 0, positive)


# ------------------------------------------------------------------------------------------------------------ options


def require(holds: bool, what: str, *, why: str, fix: str) -> None:
    if not holds:
        raise ConfigError(what, why=why, fix=fix, where="actor_rollout_ref.actor")


@register_policy_loss(
    "vanilla",
    formula="max(-A r, -A clip(r, 1 - clip_ratio_low, 1 + clip_ratio_high)), at most -A clip_ratio_c where A < 0",
    paper="Schulman et al. 2017, arXiv:1707.06347, eq. 7; dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5",
)
def vanilla(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
    clip_ratio_c: float = 3.0,
) -> TokenLoss:
    """Use PPO's clipped objective, with separate lower and upper clips (DAPO's clip-higher) and the dual clip.

    The dual clip limits the weight of a token with a negative advantage, a side that PPO's clip leaves open.
    """
    ratio = token_ratio(old_log_probs, log_probs)
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    loss, lower = dual_clip(loss, advantages, clip_ratio_c)
    return TokenLoss(loss, ratio, {"pg_clipfrac": clipped, "pg_clipfrac_lower": lower})


@register_policy_loss(
    "sapo",
    formula="-A (4 / tau) sigmoid(tau (r - 1)), tau = tau_pos where A > 0, else tau_neg",
    paper="Gao et al. 2025, arXiv:2511.20347",
)
def sapo(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
) -> TokenLoss:
    """Use a sigmoid gate in place of the clip: the gradient is PPO's at ratio 1 and fades smoothly on both sides.

    A larger temperature fades faster; ``tau_neg`` above ``tau_pos`` damps negative advantages more. The paper averages
    over the tokens of a sequence, then over sequences: ``loss_agg_mode=seq-mean-token-mean``.
    """
    for name, tau in (("tau_pos", tau_pos), ("tau_neg", tau_neg)):
        require(
            tau > 0,
            f"{name}={tau} must be positive",
            why="it is the steepness of the gate",
            fix=f"actor_rollout_ref.actor.{name}=1.0",
        )
    ratio = token_ratio(old_log_probs, log_probs)
    tau = by_sign(advantages, tau_pos, tau_neg)
    return TokenLoss(-advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), ratio)


@register_policy_loss(
    "gspo",
    formula="max(-A s, -A clip(s, 1 - clip_ratio_low, 1 + clip_ratio_high)), s = exp(mean over the sequence of log r)",
    paper="Zheng et al. 2025, arXiv:2507.18071, eq. 5 to 7; gradient per token: eq. 13 and 14",
)
def gspo(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenLoss:
    """Apply PPO's clip to the length-normalised ratio of the sequence: a sequence is clipped as a whole.

    A mean of log-ratios changes far less than one of them: the paper clips at 3e-4 and 4e-4, and averages over the tokens
    of a sequence, then over sequences (``loss_agg_mode=seq-mean-token-mean``).
    """
    ratio = sequence_ratio(old_log_probs, log_probs, response_mask)
    loss, clipped = clipped_surrogate(ratio, advantages, clip_ratio_low, clip_ratio_high)
    return TokenLoss(loss, ratio, {"pg_clipfrac": clipped})


@register_policy_loss(
    "geo_mean",
    formula="-A g, g = exp(mean over the sequence of log r, cut at clip_ratio_high where A > 0, -clip_ratio_low where A < 0)",
    paper="Zhao et al. 2025, arXiv:2507.20673",
)
def geo_mean(
    old_log_probs: Tensor,
    log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float = 0.2,
    clip_ratio_high: float = 0.2,
) -> TokenLoss:
    """Use the geometric mean of the clipped token ratios of a sequence, in place of PPO's arithmetic one.

    The clip acts on each token, in log space and only on the side that its advantage pushes to: the paper's range
    (e^-0.4, e^0.4) is ``clip_ratio_low=0.4 clip_ratio_high=0.4``. A token without advantage counts as ratio 1. The
    paper's normalisation is ``loss_agg_mode=seq-mean-token-mean``; it is global here, not over a micro-batch.
    """
    free = clamped_log_ratio(old_log_probs, log_probs)
    cut = torch.where(advantages > 0, free.clamp(max=clip_ratio_high), free.clamp(min=-clip_ratio_low))
    cut = torch.where(advantages == 0, 0.0, cut)
    ratio = torch.exp(row_mean(cut, response_mask)).expand_as(advantages)
    clipped = cut.detach() != free.detach()
    flags = {"pg_clipfrac": clipped & (advantages > 0), "pg_clipfrac_lower": clipped & (advantages < 0)}
    return TokenLoss(-advantages * ratio, ratio, flags)
