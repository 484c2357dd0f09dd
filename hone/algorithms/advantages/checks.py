"""Check the inputs of an estimator once, and convert them: floating, finite, and 0 outside the mask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hone.algorithms.masked import where_mask
from hone.errors import ConfigError

SHOWN = 8
TOKEN_INPUTS = ("values", "old_log_probs", "sum_pi_squared", "rollout_is_weights", "turn_ids")


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
    if argument == "turn_values":
        if len(value) != len(mask):
            raise ConfigError(
                f"{argument} has {len(value)} rows for {len(mask)} sequences",
                fix="pass one mapping from turn to value per row",
                where=argument,
            )
        _finite(argument, torch.tensor([sum(row.values(), 0.0) for row in value], device=mask.device))
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
