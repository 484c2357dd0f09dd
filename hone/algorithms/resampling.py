"""PF-PPO: resample the batch, so that samples with a reliable reward occur more often."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.errors import ConfigError, RewardError, did_you_mean

REWEIGHT_METHODS = ("pow", "max_min", "max_random")
KEY = "algorithm.pf_ppo"


def resampling_weights(scores: Tensor, method: str = "pow", *, weight_pow: float = 2.0) -> Tensor:
    """Return the weight of each sample (Zhang et al. 2024, "Policy Filtration for RLHF", arXiv:2409.06957, section 4).

    ==============  ==============================================================
    ``pow``         abs(score) ^ ``weight_pow``
    ``max_min``     1 for the highest and the lowest score, 0 for all others
    ``max_random``  0.4 for the highest score, 0.1 for all others
    ==============  ==============================================================

    Weights ``[B]`` are from 0 to 1; all 1 if every weight would be 0 (all scores 0). An exponent of 0 is uniform.

    Raises:
        ConfigError: unknown method, negative exponent.
        RewardError: a score is NaN or infinite; the message names the first such sample.
    """
    if method not in REWEIGHT_METHODS:
        raise ConfigError(
            f"unknown reweight_method '{method}'",
            where=f"{KEY}.reweight_method",
            fix=did_you_mean(method, REWEIGHT_METHODS),
        )
    if weight_pow < 0:
        raise ConfigError(
            f"weight_pow={weight_pow} must not be negative",
            why="a sample with score 0 would get an infinite weight",
            fix=f"{KEY}.weight_pow=2.0",
            where=f"{KEY}.weight_pow",
        )
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        row = int(bad[0])
        raise RewardError(f"the score of sample {row} is {float(scores[row])}", why="it has no weight")
    if scores.numel() == 0:
        return scores.double()
    scores = scores.double()
    if method == "pow":
        size = scores.abs()
        largest = size.max()
        # relative to the largest, so that no power overflows
        weights = (size / largest).pow(weight_pow) if largest > 0 else torch.ones_like(scores)
    elif method == "max_min":
        weights = ((scores == scores.max()) | (scores == scores.min())).to(scores.dtype)
    else:
        weights = torch.where(scores == scores.max(), 0.4, 0.1).to(scores.dtype)
    return weights


def resample(
    scores: Tensor,  # reward of each sample ``[B]``
    method: str = "pow",  # see :func:`resampling_weights`
    *,
    generator: torch.Generator,  # source of all randomness; the same state draws the same rows
    weight_pow: float = 2.0,  # see :func:`resampling_weights`
    num_samples: int | None = None,  # number of rows to draw; None: B
) -> Tensor:
    """Draw row numbers with replacement, in proportion to :func:`resampling_weights`.

    Index every column of the batch with the result. Rows are drawn independently: a group estimator would see groups of
    other sizes, so use it with ``gae``.

    Row numbers are ``[num_samples]``, on the device of ``scores``.
    """
    weights = resampling_weights(scores, method, weight_pow=weight_pow)
    count = len(weights) if num_samples is None else num_samples
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    drawn = torch.multinomial(weights.to(generator.device), count, replacement=True, generator=generator)
    return drawn.to(scores.device)
