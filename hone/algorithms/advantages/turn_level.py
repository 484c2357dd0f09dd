"""Credit by turn that no random number of turns biases: leave-one-out returns of turns, and a critic of turns.

Whether an episode reaches turn k is decided before turn k. So a baseline of turn k may depend on having reached it and on other episodes,
but not on what the policy does from turn k on, neither through the mean of a group that contains the episode nor through its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.advantages.base import (
    Groups,
    Result,
    broadcast,
    number,
    register_estimator,
    row_blocks,
    sequence_scores,
    whiten_,
)
from hone.algorithms.advantages.group_relative import normalised
from hone.algorithms.advantages.scan import discounted_returns, packings, suffix_sums
from hone.algorithms.masked import where_mask
from hone.errors import ConfigError


@dataclass(frozen=True)
class Turns:
    """Sampled tokens of a batch by turn: a stretch of them between two answers of the environment.

    Values ``[B, K]`` have one entry a turn, with K the largest number of turns; a turn without a sampled token is not a step of the policy.

    Attributes:
        ids: ``[B, T]`` turn of each token, 0 outside the mask.
        mask: ``[B, T]`` boolean.
        present: ``[B, K]`` true where the turn has a sampled token.
    """

    ids: Tensor
    mask: Tensor
    present: Tensor

    @classmethod
    def from_ids(cls, turn_ids: Tensor, response_mask: Tensor) -> Turns:
        """Build from ``turn_ids``; ConfigError if a sampled token has a negative turn number."""
        mask = response_mask.bool()
        ids = where_mask(turn_ids, mask).long()
        lowest, highest = (int(x) for x in ids.aminmax()) if ids.numel() else (0, 0)
        if lowest < 0:
            row = int((ids < 0).any(dim=-1).nonzero()[0])
            raise ConfigError(
                f"turn_ids has a negative number on a sampled token of row {row}",
                why="every sampled token needs a turn",
                fix="number the turns 0, 1, ... or set response_mask to 0 there",
                where="turn_ids",
            )
        seen = torch.zeros(len(ids), highest + 1, dtype=torch.uint8, device=ids.device)
        seen.scatter_reduce_(1, ids, mask.view(torch.uint8), "amax")
        return cls(ids, mask, seen > 0)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``[B, T]`` over the sampled tokens of each turn, ``[B, K]`` float64."""
        sums = torch.zeros(self.present.shape, dtype=torch.float64, device=values.device)
        for rows in row_blocks(len(sums)):
            sums[rows].scatter_add_(1, self.ids[rows], where_mask(values[rows], self.mask[rows]).double())
        return sums

    def broadcast(self, values: Tensor) -> Tensor:
        """Copy the value of each turn to its sampled tokens, ``[B, K]`` to ``[B, T]``; 0 outside the mask."""
        return where_mask(values.gather(1, self.ids), self.mask)

    def place(self, values: Tensor) -> Tensor:
        """Put the value of each turn on its last sampled token, ``[B, K]`` to ``[B, T]``; 0 elsewhere."""
        columns = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        last = torch.full(self.present.shape, -1, device=self.ids.device)
        last = last.scatter_reduce_(1, self.ids, torch.where(self.mask, columns, -1), "amax")
        return where_mask(values.gather(1, self.ids), columns == last.gather(1, self.ids))


def turn_returns(rewards: Tensor, present: Tensor, gamma: float = 1.0) -> Tensor:
    """Return the discounted return of each turn, ``[B, K]``; turns that are not ``present`` are skipped and get 0."""
    return discounted_returns(where_mask(rewards, present), present, gamma)


Ids = Sequence[Any] | Tensor


@register_estimator(
    "turn_rloo",
    formula="A_k = R_k - mean of R_k over the group's other responses that have a turn k; R_k = discounted reward from turn k on",
    paper="Ahmadian et al. 2024 (RLOO), arXiv:2402.14740, applied to each turn",
    group_of_one="no baseline: the advantage of a turn is its return",
    scope="group",
)
def turn_rloo(
    token_level_rewards: Tensor, response_mask: Tensor, *, group_ids: Ids, turn_ids: Tensor, gamma: float = 1.0
) -> Result:
    """Compare the return of each turn with that of the same turn in the other responses to the prompt.

    A turn that no other response reached is compared with their whole returns. The expected gradient is the policy gradient, however
    many turns responses have. All tokens of a turn have its advantage; returns equal the returns of turns.
    """
    groups, turns = Groups.from_ids(group_ids, response_mask), Turns.from_ids(turn_ids, response_mask)
    returns = turn_returns(turns.sum(token_level_rewards), turns.present, gamma)
    others, reached = _others(returns, turns.present, groups)
    start = returns.gather(1, turns.present.long().argmax(-1, keepdim=True))
    whole, members = _others(start, turns.present.any(-1, keepdim=True), groups)
    baseline = torch.where(reached > 0, others / reached.clamp(min=1), whole / members.clamp(min=1))
    dtype = token_level_rewards.dtype
    advantages = turns.broadcast(where_mask(returns - baseline, turns.present).to(dtype))
    return advantages, turns.broadcast(returns.to(dtype))


def _others(values: Tensor, present: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return the sum and the number of present ``values [B, K]`` in the same column of the group's other rows, ``[B, K]`` each."""
    parts = where_mask(values, present), present.to(values)
    sums, counts = (x.new_zeros(groups.size, x.shape[1]).index_add_(0, groups.index, x) for x in parts)
    return sums[groups.index] - parts[0], counts[groups.index] - parts[1]


@register_estimator(
    "turn_gae",
    formula="A_k = sum_m (gamma lam)^m (r_{k+m} + gamma V_{k+m+1} - V_{k+m}) over turns, V_k before the first token of turn k",
    paper="Schulman et al. 2016, arXiv:1506.02438, eq. 16, with turns as steps",
)
def turn_gae(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    values: Tensor,
    turn_ids: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> Result:
    """Compute generalised advantage estimation with turns as steps; the state after the last turn has value 0.

    The critic's value of a turn is the one before its first sampled token. All tokens of a turn have its advantage, and its return as
    the critic's target. ``whiten`` whitens advantages over the batch, as ``gae`` does; without it they are unbiased.
    """
    turns = Turns.from_ids(turn_ids, response_mask)
    columns = torch.arange(response_mask.shape[1], device=response_mask.device).expand_as(turns.ids)
    last = columns.shape[1] - 1
    first = torch.full(turns.present.shape, last, device=columns.device)
    first = first.scatter_reduce_(1, turns.ids, torch.where(turns.mask, columns, last), "amin")
    before = where_mask(values.double().gather(1, first), turns.present)
    rewards = where_mask(turns.sum(token_level_rewards), turns.present)
    advantages = torch.zeros_like(before)
    for rows, packing in packings(turns.present):
        now = packing.pack(before[rows])
        delta = packing.pack(rewards[rows]) - now
        delta[:, :-1] += gamma * now[:, 1:]
        packing.unpack_into(advantages[rows], suffix_sums(delta, gamma * lam))
    dtype = token_level_rewards.dtype
    returns = turns.broadcast(where_mask(advantages + before, turns.present).to(dtype))
    result = turns.broadcast(where_mask(advantages, turns.present).to(dtype))
    return (whiten_(result, response_mask) if whiten else result), returns


@register_estimator(
    "turn_value_by_forks",
    formula="A_k = V_next - V_before around turn k; V of a forked turn is the mean reward of its continuations, of the first turn the mean "
    "of the group's other responses, after the last the response's own reward",
    paper="Kazemnejad et al. 2024 (VinePPO), arXiv:2410.01679, with turns as steps and few of them forked",
    group_of_one="no baseline before the first turn: its value is 0",
    scope="group",
)
def turn_value_by_forks(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    turn_ids: Tensor,
    turn_values: Sequence[Mapping[int, float]],
    old_log_probs: Tensor | None = None,
) -> Result:
    """Credit each stretch of turns between two known values with their difference.

    Values are those of states before a turn, so they are baselines for it and unbiased outcomes of the turns before. Without forks
    this is ``rloo``. Returns are the values after a token's stretch.
    """
    del old_log_probs  # the trainer computes the entropies of turns with them
    groups, turns = Groups.from_ids(group_ids, response_mask), Turns.from_ids(turn_ids, response_mask)
    rewards = where_mask(turns.sum(token_level_rewards), turns.present).sum(-1, keepdim=True)
    others, members = _others(rewards, turns.present.any(-1, keepdim=True), groups)
    before = torch.zeros(turns.present.shape, dtype=torch.float64, device=rewards.device)
    after = before.clone()
    first, earned = (others / members.clamp(min=1))[:, 0].tolist(), rewards[:, 0].tolist()
    for row, known in enumerate(turn_values):
        present = turns.present[row].nonzero()[:, 0].tolist()
        stops = [turn for turn in sorted(known) if turn in present[1:]]
        worth = [first[row], *(known[turn] for turn in stops), earned[row]]
        bounds = [0, *stops, turns.present.shape[1]]
        for (start, stop), (low, high) in zip(pairwise(bounds), pairwise(worth), strict=True):
            before[row, start:stop], after[row, start:stop] = low, high
    dtype = token_level_rewards.dtype
    return turns.broadcast((after - before).to(dtype)), turns.broadcast(after.to(dtype))


@register_estimator(
    "gigpo",
    formula="A = A_response + step_advantage_w * A_turn; A_response as in GRPO, A_turn = (R - mean) / (std + epsilon) over "
    "the group's turns from the same state, R = discounted reward to come from the turn",
    paper="Feng et al. 2025 (GiGPO), arXiv:2505.10978, episode and step relative advantages",
    group_of_one="no baseline: A_response is the score itself; a turn whose state occurs once has A_turn = 0",
    scope="group",
)
def gigpo(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    *,
    group_ids: Ids,
    turn_ids: Tensor,
    turn_group_ids: Sequence[Sequence[Any]] | Tensor | None = None,
    gamma: float = 1.0,
    step_advantage_w: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> Result:
    """Compare responses with responses, and turns with turns from the same state.

    ``turn_group_ids`` names the state before each turn: one sequence of names per row, or ``[B, K]``; equal names in a
    prompt group mean the same state. Without it, turn k of a response is compared with turn k of the others. The advantage
    is the same on all tokens of a turn; returns equal advantages. The paper uses ``gamma=0.95``. Environment
    rewards are those on the tokens of a turn.
    """
    groups, turns = Groups.from_ids(group_ids, response_mask), Turns.from_ids(turn_ids, response_mask)
    how = {"by_std": norm_adv_by_std_in_grpo, "epsilon": epsilon}
    whole = normalised(sequence_scores(token_level_rewards), groups, **how)
    returns = turn_returns(turns.sum(token_level_rewards), turns.present, gamma).flatten()
    states = _states(groups, turns, turn_group_ids)
    steps = torch.where(states.singleton, 0.0, normalised(returns, states, **how)).view_as(turns.present)
    dtype = token_level_rewards.dtype
    advantages = broadcast(whole, response_mask, dtype) + step_advantage_w * turns.broadcast(steps.to(dtype))
    return advantages, advantages.clone()


def _states(groups: Groups, turns: Turns, names: Sequence[Sequence[Any]] | Tensor | None) -> Groups:
    """Return groups of turns, over ``[B * K]``: the same prompt group and the same state."""
    rows, width = turns.present.shape
    if names is None:
        state = torch.arange(width, device=turns.ids.device).expand(rows, width)
    else:
        state = _numbered(names, turns)
    key = groups.index[:, None] * (int(state.max()) + 1) + state
    index, size = number(key.flatten(), key.device)
    return Groups.from_numbers(index, size, turns.present.flatten())


def _numbered(names: Sequence[Sequence[Any]] | Tensor, turns: Turns) -> Tensor:
    """Return numbers ``[B, K]`` for names, 0 for turns that do not exist."""
    rows, width = turns.present.shape
    if len(names) != rows:
        raise ConfigError(
            f"turn_group_ids has {len(names)} rows for {rows} sequences",
            fix="pass one sequence of state names per row",
            where="turn_group_ids",
        )
    lengths = torch.tensor([len(row) for row in names], device=turns.ids.device)
    named = torch.arange(width, device=turns.ids.device) < lengths[:, None]
    missing = turns.present & ~named
    if missing.any():
        row, turn = missing.nonzero()[0].tolist()
        raise ConfigError(
            f"turn_group_ids of row {row} names {int(lengths[row])} states, but turn {turn} has sampled tokens",
            why="a turn is compared with the other turns from its state",
            fix="name the state before each turn, or pass turn_group_ids=None to compare turns of the same number",
            where="turn_group_ids",
        )
    if isinstance(names, Tensor):
        index, _ = number(names[:, :width].flatten(), turns.ids.device)
    else:
        index, _ = number(list(chain.from_iterable(row[:width] for row in names)), turns.ids.device)
    return torch.zeros(rows, width, dtype=torch.int64, device=turns.ids.device).masked_scatter_(named, index)
