"""Advantage estimators: from token rewards to how much better than expected each token was.

Every estimator is called the same way, ``estimator(token_level_rewards, response_mask, **inputs, **options)``, and
returns ``(advantages, returns)``, both ``[B, T]`` and 0 outside the mask. Tokens with mask 0 (padding, tool output) are
skipped: they are no steps of the policy, and a reward written on one is ignored. Rows without any selected token take
no part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import masked_sum, masked_whiten, where_mask
from hone.errors import ConfigError, did_you_mean
from hone.registry import Registry

INPUTS = {
    "groups": ("group_ids", "the prompt group of every sequence; sample several responses a prompt (rollout.n >= 2)"),
    "values": ("values", "the critic's values; train a critic (critic.enable=true)"),
}
"""What an estimator may need: need -> (keyword argument, where it comes from)."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator: callable, and able to say what it needs before anything is generated.

    Attributes:
        name: first registered name.
        compute: the function behind it.
        needs: keys of :data:`INPUTS`.
        options: plain-number options it takes, named as the configuration keys under ``algorithm``.
        formula: in one line.
        paper: where it comes from.
        group_of_one: what happens to a group with a single response; empty when there are no groups.
    """

    name: str
    compute: Callable[..., tuple[Tensor, Tensor]]
    needs: frozenset[str]
    options: frozenset[str]
    formula: str
    paper: str
    group_of_one: str = ""

    def __call__(self, token_level_rewards: Tensor, response_mask: Tensor, **arguments: Any) -> tuple[Tensor, Tensor]:
        """Return ``(advantages, returns)``, each ``[B, T]``.

        Args:
            token_level_rewards: ``[B, T]``; usually one number on the last sampled token of each row.
            response_mask: ``[B, T]``, 1 on tokens that the policy sampled.
            **arguments: options, and inputs (``group_ids``: length B, ``values``: ``[B, T]``; those that are not needed
                are ignored).

        Raises:
            ConfigError: a needed input is missing, or an option is unknown.
        """
        inputs = {argument: arguments.pop(argument, None) for argument, _ in INPUTS.values()}
        needed = {argument: inputs[argument] for argument, _ in map(INPUTS.__getitem__, sorted(self.needs))}
        for need in sorted(self.needs):
            argument, source = INPUTS[need]
            if needed[argument] is None:
                raise ConfigError(
                    f"advantage estimator '{self.name}' needs {argument}",
                    why=self.formula,
                    fix=f"supply {argument}: {source}",
                    where="algorithm.adv_estimator",
                )
        for option in arguments:
            if option not in self.options:
                raise ConfigError(
                    f"advantage estimator '{self.name}' has no option '{option}'",
                    fix=did_you_mean(option, self.options) if self.options else "it takes no options",
                    where="algorithm",
                )
        return self.compute(token_level_rewards, response_mask, **needed, **arguments)


advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator", key="algorithm.adv_estimator")


def register_estimator(
    *names: str, needs: Sequence[str] = (), formula: str, paper: str, group_of_one: str = ""
) -> Callable[[Callable[..., tuple[Tensor, Tensor]]], AdvantageEstimator]:
    """Return a decorator that registers ``fn(token_level_rewards, response_mask, *, <needed inputs>, <options>)``."""

    def decorate(compute: Callable[..., tuple[Tensor, Tensor]]) -> AdvantageEstimator:
        arguments = {INPUTS[need][0] for need in needs}
        keywords = {p.name for p in inspect.signature(compute).parameters.values() if p.kind is p.KEYWORD_ONLY}
        estimator = AdvantageEstimator(
            names[0], compute, frozenset(needs), frozenset(keywords - arguments), formula, paper, group_of_one
        )
        return advantage_estimators.register(*names)(estimator)

    return decorate


# ------------------------------------------------------------------------------------------------------------- groups


@dataclass(frozen=True)
class Groups:
    """Rows by group; rows without a selected token belong to none.

    Attributes:
        index: ``[B]`` group number of each row.
        member: ``[B]`` 1.0 where the row takes part (float64).
        count: ``[B]`` members of the row's group.
    """

    index: Tensor
    member: Tensor
    count: Tensor

    @classmethod
    def of(cls, group_ids: Sequence[Any] | Tensor, response_mask: Tensor) -> Groups:
        """Number the groups in order of appearance.

        Raises:
            ConfigError: ``group_ids`` has not one entry a row.
        """
        if len(group_ids) != len(response_mask):
            raise ConfigError(
                f"group_ids has {len(group_ids)} entries for {len(response_mask)} sequences",
                fix="pass one group id a row",
            )
        numbers: dict[Any, int] = {}
        ids = group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids
        index = torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids], dtype=torch.int64)
        index = index.to(response_mask.device)
        member = (response_mask.sum(dim=-1) > 0).double()
        return cls(index, member, _group_sum(member, index))

    def mean(self, values: Tensor) -> Tensor:
        """Mean of the row's group, ``[B]``; float64, so that equal values have exactly no spread."""
        return _group_sum(values.double() * self.member, self.index) / self.count.clamp(min=1)

    def std(self, values: Tensor) -> Tensor:
        """Standard deviation (n - 1) of the row's group, ``[B]`` float64; 0 for groups of one."""
        squares = (values.double() - self.mean(values)).square() * self.member
        return (_group_sum(squares, self.index) / (self.count - 1).clamp(min=1)).sqrt()


def _group_sum(values: Tensor, index: Tensor) -> Tensor:
    return torch.zeros(len(values), dtype=values.dtype, device=values.device).index_add_(0, index, values)[index]


# --------------------------------------------------------------------------------------------------------- estimators


@register_estimator(
    "grpo",
    "grpo_vectorized",
    needs=["groups"],
    formula="A = (s - mean of the group) / (std of the group + epsilon); without norm_adv_by_std_in_grpo A = s - mean",
    paper="Shao et al. 2024, arXiv:2402.03300, eq. 4; without std: Liu et al. 2025 (Dr. GRPO), arXiv:2503.20783",
    group_of_one="no baseline: the advantage is the score itself (divided by 1 + epsilon when normalising)",
)
def grpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Sequence[Any] | Tensor,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Score of a response against the mean of its group, the same on all its tokens; returns equal advantages.

    The standard deviation divides by n - 1. A group of equal scores has advantage 0.
    """
    groups = Groups.of(group_ids, response_mask)
    scores = masked_sum(token_level_rewards, response_mask, dim=-1).double()
    alone = groups.count <= 1
    advantages = scores - torch.where(alone, 0.0, groups.mean(scores))
    if norm_adv_by_std_in_grpo:
        advantages = advantages / (torch.where(alone, 1.0, groups.std(scores)) + epsilon)
    spread = advantages.to(token_level_rewards.dtype)[:, None].expand_as(response_mask)
    spread = where_mask(spread, response_mask)
    return spread, spread.clone()


@register_estimator(
    "gae",
    needs=["values"],
    formula="A_t = sum_k (gamma lam)^k (r_{t+k} + gamma V_{t+k+1} - V_{t+k}), whitened over the batch; returns = A + V",
    paper="Schulman et al. 2016, arXiv:1506.02438, eq. 16",
)
def gae(
    token_level_rewards: Tensor, response_mask: Tensor, *, values: Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the selected tokens; the state after the last one has value 0.

    Advantages are whitened over all selected tokens given; returns are taken before whitening.
    """
    mask = response_mask.bool()
    rewards, values = where_mask(token_level_rewards, mask), where_mask(values, mask).to(token_level_rewards.dtype)
    # time runs along dim 0: each step of the two backward passes then reads one contiguous row
    keep = mask.t().contiguous()
    decay = torch.ones_like(keep, dtype=values.dtype).masked_fill_(keep, gamma * lam)
    value_rows = values.t().contiguous()
    next_values, following = torch.empty_like(value_rows), value_rows.new_zeros(len(rewards))
    for t in range(len(value_rows) - 1, -1, -1):
        next_values[t] = following
        following = torch.where(keep[t], value_rows[t], following)
    deltas = where_mask(rewards.t() + gamma * next_values - value_rows, keep)
    running = deltas.new_zeros(len(rewards))
    for t in range(len(deltas) - 1, -1, -1):
        # a skipped token has delta 0 and decay 1: what comes after it passes through unchanged
        running = deltas[t].addcmul_(decay[t], running)
    raw = where_mask(deltas.t(), mask)
    return masked_whiten(raw, mask), where_mask(raw + values, mask)
