"""The block ``reward``: what is good."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.feedback import RewardModelUseConfig
from hone.config.fields import block, choice, named, number


@dataclass
class CustomRewardConfig:
    """A reward function of your own."""

    path: str | None = None
    """Python file that holds it; null uses the built-in scorer of each data_source."""
    name: str = "compute_score"
    """Name of the function: f(data_source, solution_str, ground_truth, extra_info) -> float or dict with "score"."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call."""


@dataclass
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO): the last tokens before the limit cost more and more."""

    enable: bool = False
    """Subtract the penalty from the reward of training responses; validation shows the reward without it."""
    len: int = number(128, low=1)
    """Tokens before data.max_response_length over which the penalty grows from 0 to penalty_factor."""
    penalty_factor: float = number(1.0, low=0)
    """The penalty of a response of full length."""
    log: bool = False
    """Also log the penalty and the share of responses that have one, as reward/overlong_reward/mean and
    reward/overlong/mean."""


@dataclass
class RewardConfig:
    """How responses are scored."""

    custom_reward_function: CustomRewardConfig = block(CustomRewardConfig)
    """A reward function of your own."""
    reward_model: RewardModelUseConfig = block(RewardModelUseConfig)
    """A trained reward model."""
    scorer: str | None = named(None, "scorer")
    """Built-in scorer for every row; null means the one registered for the row's data_source."""
    scorer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the built-in scorer, for example {method: flexible} for gsm8k."""
    overlong_buffer: OverlongBufferConfig = block(OverlongBufferConfig)
    """Punishment of responses that are nearly too long."""
    num_workers: int = number(2, low=1)
    """Worker processes that run a reward function of your own."""
    timeout: float = number(30.0, above=0)
    """Seconds one call may take."""
    on_error: str = choice("count", "count", "stop")
    """A call that raises, times out or returns no number: count it (score 0, reward/error_rate, first traceback in the
    log) or stop the run."""
    max_error_rate: float = number(0.5, low=0, high=1)
    """With on_error=count, stop the run when more than this share of a batch fails: nothing could be learned."""
