"""Shared parts of advantage estimators: registration, calls, description and checks."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import where_mask
from hone.algorithms.options import check_options, options_of
from hone.errors import ConfigError
from hone.methods import ESTIMATOR_INPUTS, EstimatorInputs
from hone.registry import Registry

SHOWN = 8
TOKEN_INPUTS = ("values", "process_rewards", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "turn_ids")

_OF_TURNS = {
    "turn_values": "mapping from turn to value",
    "turn_baselines": "sequence of pairs of role and baseline",
    "turn_roles": "sequence of roles",
}


def checked_inputs(
    rewards: Tensor, mask: Tensor, inputs: Mapping[str, Any], *, min_group: int, name: str
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return rewards, boolean mask and the inputs in the form that an estimator's function expects."""
    _same_shape("response_mask", mask, rewards)
    selected = mask.bool()
    if not selected.any():
        raise ConfigError(
            f"response_mask selects none of {rewards.shape[0]} x {rewards.shape[1]} tokens",
            why="the batch has no token to learn from",
            fix="set response_mask to 1 on the tokens that the policy sampled",
            where="response_mask",
        )
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    clean = where_mask(rewards, selected).to(dtype)
    _finite("token_level_rewards", clean)
    if inputs.get("group_ids") is not None:
        _check_groups(inputs["group_ids"], len(rewards), min_group, name)
    ready = {
        argument: None if value is None else _prepared(argument, value, selected, dtype)
        for argument, value in inputs.items()
    }
    return clean, selected, ready


def _prepared(argument: str, value: Any, mask: Tensor, dtype: torch.dtype) -> Any:
    if argument in TOKEN_INPUTS:
        _same_shape(argument, value, mask)
        return value if argument == "turn_ids" else where_mask(value, mask).to(dtype)
    if argument == "reward_baselines":
        return _row_scores(argument, value, mask, dtype)
    if argument == "reward_components":
        return {key: _row_scores(f"reward_components['{key}']", scores, mask, dtype) for key, scores in value.items()}
    if argument in _OF_TURNS:
        if len(value) != len(mask):
            raise ConfigError(
                f"{argument} has {len(value)} rows for {len(mask)} sequences",
                fix=f"pass one {_OF_TURNS[argument]} per row",
                where=argument,
            )
        if argument == "turn_roles":
            return value
        numbers = (row.values() if argument == "turn_values" else [baseline for _, baseline in row] for row in value)
        _finite(argument, torch.tensor([sum(row, 0.0) for row in numbers], device=mask.device))
    return value


def _same_shape(argument: str, tensor: Tensor, other: Tensor) -> None:
    if other.dim() != 2 or tensor.shape != other.shape:
        raise ConfigError(
            f"{argument} has shape {list(tensor.shape)}, token_level_rewards {list(other.shape)}",
            fix="pass both as [B, T]: one row per response, one column per token",
            where=argument,
        )


def _row_scores(argument: str, scores: Any, mask: Tensor, dtype: torch.dtype) -> Tensor:
    scores = torch.as_tensor(scores, device=mask.device)
    if scores.shape != mask.shape[:1]:
        raise ConfigError(
            f"{argument} has shape {list(scores.shape)} for {len(mask)} sequences",
            fix="pass one number per row, [B]",
            where=argument,
        )
    scores = where_mask(scores, mask.any(dim=-1)).to(torch.promote_types(scores.dtype, dtype))
    _finite(argument, scores)
    return scores


def _finite(argument: str, values: Tensor) -> None:
    # the sum over a row is finite if its values are; an exact second check excludes overflows
    if torch.isfinite(values if values.dim() == 1 else values.sum(dim=-1)).all():
        return
    finite = torch.isfinite(values) if values.dim() == 1 else torch.isfinite(values).all(dim=-1)
    bad = (~finite).nonzero().flatten().tolist()
    if bad:
        listed_rows = ", ".join(map(str, bad[:SHOWN])) + (", ..." if len(bad) > SHOWN else "")
        raise ConfigError(
            f"{argument} contains NaN or infinity in {len(bad)} of {len(values)} rows: {listed_rows}",
            why="one such number makes every advantage of its group, or of the whole batch, invalid",
            fix="let the reward function return finite numbers, or raise an error",
            where=argument,
        )


def _check_groups(group_ids: Any, size: int, min_group: int, name: str) -> None:
    if len(group_ids) != size:
        raise ConfigError(
            f"group_ids has {len(group_ids)} entries for {size} sequences",
            fix="pass one group id per row",
            where="group_ids",
        )
    if min_group > 1:
        sizes = Counter(group_ids.tolist() if isinstance(group_ids, Tensor) else group_ids)
        small = [group for group, count in sizes.items() if count < min_group]
        if small:
            raise ConfigError(
                f"{len(small)} of {len(sizes)} groups have fewer than {min_group} responses, the first is {small[0]!r}",
                why=f"advantage estimator '{name}' compares the responses of a group with each other",
                fix=f"actor_rollout_ref.rollout.n={max(min_group, 8)}",
                where="actor_rollout_ref.rollout.n",
            )


INPUTS: Mapping[str, tuple[str, str]] = {
    "groups": ("group_ids", "the prompt group of every sequence; sample several responses per prompt (rollout.n >= 2)"),
    "values": ("values", "the critic's values; train a critic (critic.enable=true)"),
    "process_rewards": (
        "process_rewards",
        "a reward of each token, [B, T]; the critic computes them when algorithm.adv_estimator=prime",
    ),
    "greedy_baseline": (
        "reward_baselines",
        "the score of each prompt's greedy response, [B]; the trainer generates it when algorithm.adv_estimator=remax",
    ),
    "old_log_probs": (
        "old_log_probs",
        "the log-probs of the sampled tokens before the update; the trainer computes them, or uses the engine's "
        "with algorithm.rollout_correction.bypass_mode=true",
    ),
    "sum_pi_squared": (
        "sum_pi_squared",
        "the sum of squared probabilities at each token; actor_rollout_ref.actor.calculate_sum_pi_squared=true",
    ),
    "rollout_is_weights": (
        "rollout_is_weights",
        "importance weights of sampling engine against trainer; algorithm.rollout_correction.rollout_is=token",
    ),
    "reward_components": (
        "reward_components",
        "one score per response for each component, name -> [B]; algorithm.gdpo_reward_keys=[correct,format]",
    ),
    "turns": ("turn_ids", "the turn of each token, [B, T]; use an agent loop that records turns"),
    "turn_groups": (
        "turn_group_ids",
        "names of the states before each turn, one sequence per row; use an agent loop that records states",
    ),
    "turn_values": (
        "turn_values",
        "values of turns, one mapping from turn to value per row; the trainer continues episodes from them when "
        "algorithm.adv_estimator=turn_value_by_forks",
    ),
    "turn_baselines": (
        "turn_baselines",
        "role and baseline of each turn, one sequence of pairs per row; the trainer keeps an average of each role when "
        "algorithm.adv_estimator=rae",
    ),
    "turn_roles": (
        "turn_roles",
        "role of each turn, one sequence per row; use an agent loop that records roles (self_play, proposer_solver)",
    ),
}
"""Inputs of estimators: name -> (keyword argument, the key or the part of the program that supplies it)."""

Result = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class AdvantageEstimator:
    """A registered estimator: callable, with a declaration of its inputs."""

    name: str  # first registered name
    compute: Callable[..., Result]
    needs: frozenset[str]  # keys of :data:`INPUTS` that it requires
    options: frozenset[str]  # plain-number options it takes, named as the configuration keys under ``algorithm``
    formula: str  # formula in one line
    paper: str
    group_of_one: str = ""  # treatment of a group with a single response; empty if there are no groups
    uses: frozenset[str] = frozenset()  # keys of :data:`INPUTS` that it uses if they are given
    min_group: int = 1  # smallest number of responses of a group
    # rows that the advantage of a token depends on: its ``sequence``, its ``group``, or the whole ``batch``. A batch
    # may be split along these lines before the call.
    scope: str = "batch"

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.compute) or ""

    @torch.no_grad()
    def __call__(self, token_level_rewards: Tensor, response_mask: Tensor, **arguments: Any) -> Result:
        """Return ``(advantages, returns)``: constants, each ``[B, T]``, 0 where the mask is 0.

        Their type is that of the rewards, and float32 for bfloat16, float16 and integer rewards. Values where the mask is 0
        are ignored.

        Args:
            token_level_rewards: ``[B, T]``; usually one number on the last sampled token of each row.
            response_mask: ``[B, T]``, 1 on tokens that the policy sampled.
            **arguments: options, and inputs; inputs that are not needed are ignored.

                    ``group_ids``: length B, the prompt group of each row.
                    ``values``: ``[B, T]``, the critic's values.
                    ``reward_baselines``: ``[B]``, the score of the prompt's greedy response.
                    ``old_log_probs``, ``sum_pi_squared``, ``rollout_is_weights``: ``[B, T]``.
                    ``reward_components``: name -> ``[B]``.
                    ``turn_ids``: ``[B, T]``, the turn of each token: 0, 1, ...
                    ``turn_group_ids``: one sequence per row; item k names the state before turn k.
                    ``turn_values``: one mapping per row, from turn to the expected reward of the response before it.
                    ``turn_baselines``: one sequence per row; item k is the role and the baseline of turn k.
                    ``turn_roles``: one sequence per row; item k is the role of turn k.

        Raises:
            ConfigError: a needed input is missing, has the wrong shape, or contains NaN or infinity; an option is unknown;
                the mask selects nothing; a group is too small.
        """
        inputs = {argument: arguments.pop(argument, None) for argument, _ in INPUTS.values()}
        self._check_names(inputs, arguments)
        wanted = [INPUTS[name][0] for name in sorted(self.needs | self.uses)]
        rewards, mask, ready = checked_inputs(
            token_level_rewards,
            response_mask,
            {argument: inputs[argument] for argument in wanted},
            min_group=self.min_group,
            name=self.name,
        )
        return self.compute(rewards, mask, **ready, **arguments)

    def _check_names(self, inputs: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        for need in sorted(self.needs):
            argument, source = INPUTS[need]
            if inputs[argument] is None:
                raise ConfigError(
                    f"advantage estimator '{self.name}' needs {argument}",
                    why=self.formula,
                    fix=f"supply {argument}: {source}",
                    where="algorithm.adv_estimator",
                )
        check_options(f"advantage estimator '{self.name}'", options, self.options, where="algorithm")


def _adopt(imported: Any, path: str) -> AdvantageEstimator:
    """Return the estimator at an import path: a registered one, or a function like those of :func:`register_estimator`.

    The inputs of such a function are its keyword-only arguments: inputs without a default are needed, inputs with a
    default are used if given, and all other arguments are options.
    """
    if isinstance(imported, AdvantageEstimator):
        return imported
    if not inspect.isfunction(imported):
        raise TypeError("expected a function of (token_level_rewards, response_mask, *, inputs, options)")
    keywords = options_of(imported)
    inputs = {name: keywords[argument] for name, (argument, _) in INPUTS.items() if argument in keywords}
    needs = frozenset(name for name, default in inputs.items() if default is inspect.Parameter.empty)
    options = frozenset(keywords) - {INPUTS[name][0] for name in inputs}
    summary = (inspect.getdoc(imported) or "").partition("\n")[0]
    return AdvantageEstimator(
        path, imported, needs, options, summary, f"the user's own: {path}", uses=frozenset(inputs) - needs
    )


advantage_estimators: Registry[AdvantageEstimator] = Registry(
    "advantage estimator", key="algorithm.adv_estimator", adopt=_adopt
)


def register_estimator(
    *names: str,
    needs: Sequence[str] = (),
    uses: Sequence[str] = (),
    formula: str,
    paper: str,
    group_of_one: str = "",
    min_group: int = 1,
    scope: str = "batch",
) -> Callable[[Callable[..., Result]], AdvantageEstimator]:
    """Return a decorator that registers ``fn(token_level_rewards, response_mask, *, <inputs>, <options>)``.

    The function receives rewards that are finite, floating and 0 where the mask is 0, a boolean mask, and its other inputs
    prepared in the same way. Keyword arguments that are not inputs are its options. See :class:`AdvantageEstimator` for
    the meaning of the arguments. Inputs of built-in names are listed in
    :data:`hone.methods.ESTIMATOR_INPUTS` instead of ``needs`` and ``uses``.
    """
    inputs = ESTIMATOR_INPUTS.get(names[0], EstimatorInputs(frozenset(needs), frozenset(uses)))

    def decorate(compute: Callable[..., Result]) -> AdvantageEstimator:
        arguments = {INPUTS[name][0] for name in inputs.needs | inputs.uses}
        estimator = AdvantageEstimator(
            names[0],
            compute,
            inputs.needs,
            frozenset(options_of(compute).keys() - arguments),
            formula,
            paper,
            group_of_one,
            inputs.uses,
            min_group,
            scope,
        )
        return advantage_estimators.register(*names)(estimator)

    return decorate


ROWS = 64
"""Number of rows per block where float64 copies are made, so that they stay in the processor's cache."""


def row_blocks(size: int) -> Iterator[slice]:
    """Yield slices of :data:`ROWS` rows that cover ``size`` rows."""
    return (slice(start, start + ROWS) for start in range(0, size, ROWS))


def sequence_scores(token_level_rewards: Tensor) -> Tensor:
    """Return the sum of each row of rewards that are 0 outside the mask, ``[B]`` float64.

    In float64, responses of equal reward have equal scores wherever in the row the rewards are.
    """
    blocks = [token_level_rewards[rows].double().sum(dim=-1) for rows in row_blocks(len(token_level_rewards))]
    return torch.cat(blocks)


def token_counts(response_mask: Tensor) -> Tensor:
    """Return the number of selected tokens of each row, ``[B]`` int64 (in blocks: the sum of a boolean tensor copies it to int64)."""
    return torch.cat([response_mask[rows].sum(dim=-1) for rows in row_blocks(len(response_mask))])


def broadcast(values: Tensor, response_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy the value of each row to its selected tokens, ``[B]`` to ``[B, T]``; 0 outside the mask."""
    return response_mask * values.to(dtype)[:, None]


def broadcast_twice(values: Tensor, response_mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the result of :func:`broadcast` twice, as advantages and as returns (two tensors)."""
    advantages = broadcast(values, response_mask, dtype)
    return advantages, advantages.clone()


def whiten_(values: Tensor, response_mask: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scale ``values [B, T]``, which are 0 outside the mask, to mean 0 and variance 1 over it, in place.

    The variance divides by n - 1. A single selected value, and equal values, become 0: the mean is computed in
    float64, because its rounding, divided by sqrt(epsilon), would otherwise look like an advantage.
    """
    count = token_counts(response_mask).sum().double().clamp(min=1)
    mean = sequence_scores(values).sum() / count
    values.sub_(mean.to(values.dtype)).mul_(response_mask)
    squares = torch.linalg.vector_norm(values, dim=-1).double().square().sum()
    return values.mul_(torch.rsqrt(squares / (count - 1).clamp(min=1) + epsilon).to(values.dtype))


@dataclass(frozen=True)
class Groups:
    """Groups of rows; rows without a selected token belong to none. Statistics are float64, one per row, ``[B]``.

    Attributes:
        index: ``[B]`` group number of each row.
        member: ``[B]`` true if the row takes part.
        count: ``[B]`` number of members of the row's group, float64.
        size: number of groups.
    """

    index: Tensor
    member: Tensor
    count: Tensor
    size: int

    @classmethod
    def from_ids(cls, group_ids: Sequence[Any] | Tensor, response_mask: Tensor) -> Groups:
        """Number the groups in order of appearance; members are rows with a selected token."""
        return cls.from_numbers(*number(group_ids, response_mask.device), response_mask.any(dim=-1))

    @classmethod
    def from_numbers(cls, index: Tensor, size: int, member: Tensor) -> Groups:
        """Build from group numbers below ``size``."""
        count = torch.bincount(index[member], minlength=size).double()
        return cls(index, member, count[index], size)

    @property
    def singleton(self) -> Tensor:
        """Return ``[B]``, true for groups without another member."""
        return self.count <= 1

    def agree(self, values: Tensor) -> Tensor:
        """Return ``[B]``, true if all members of the group have the same value; for a group of one, if it is 0."""
        lowest = -self.best_two(-values)[0]
        return torch.where(self.singleton, values == 0, self.best_two(values)[0] == lowest)

    def total(self, values: Tensor) -> Tensor:
        """Return the sum over the group's members."""
        values = torch.where(self.member, values.double(), 0.0)
        return values.new_zeros(self.size).index_add_(0, self.index, values)[self.index]

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over the group's members in float64, so that the standard deviation of equal values is nearly 0."""
        return self.total(values) / self.count.clamp(min=1)

    def std(self, values: Tensor) -> Tensor:
        """Return the standard deviation (n - 1) over the group's members; 0 for groups of one."""
        squares = (values.double() - self.mean(values)).square()
        return (self.total(squares) / (self.count - 1).clamp(min=1)).sqrt()

    def best_two(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the largest ``[B]`` and second largest ``[B]`` of the group's members, -inf if there are fewer.

        Third is true on the row of the largest (the first of equal ones).
        """
        values = torch.where(self.member, values.double(), -torch.inf)
        best = values.new_full((self.size,), -torch.inf).scatter_reduce_(0, self.index, values, "amax")[self.index]
        row = torch.arange(len(values), device=values.device)
        holder = torch.where(self.member & (values == best), row, len(row))
        first = row.new_full((self.size,), len(row)).scatter_reduce_(0, self.index, holder, "amin")[self.index]
        others = torch.where(row == first, -torch.inf, values)
        second = values.new_full((self.size,), -torch.inf).scatter_reduce_(0, self.index, others, "amax")[self.index]
        return best, second, row == first


def number(ids: Sequence[Any] | Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Number equal ids equally from 0; return the numbers and their count."""
    if isinstance(ids, Tensor):
        distinct, index = torch.unique(ids.to(device), return_inverse=True)
        return index, len(distinct)
    numbers: dict[Any, int] = {}
    index = torch.tensor([numbers.setdefault(i, len(numbers)) for i in ids], dtype=torch.int64)
    return index.to(device), len(numbers)
