"""The block ``reward``: what is good."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.feedback import RewardModelUseConfig
from hone.config.fields import block, choice, named, number
from hone.config.reward_services import JudgeConfig, SandboxConfig, SandboxFusionConfig


@dataclass
class CustomRewardConfig:
    """A reward function of your own."""

    path: str | None = None
    """Python file that holds it, or the URL of a server that is sent the arguments as JSON and answers as the function would;
    null uses the built-in scorer of each data_source."""
    name: str = "compute_score"
    """Name of the function: f(data_source, solution_str, ground_truth, extra_info) -> float or dict with "score"."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call."""


@dataclass
class OverlongBufferConfig:
    """Soft overlong punishment (DAPO): the last tokens before the limit cost more and more."""

    enable: bool = False
    """Subtract the penalty from the reward of training responses; validation shows the reward without it. Always on with
    reward.reward_manager=dapo."""
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
    reward_manager: str = choice("naive", "naive", "prime", "dapo", "batch")
    """How a reward function of your own is called. naive and prime: once for each response, in worker processes. dapo: the
    same, with the overlong punishment switched on. batch: once for all responses of a batch, with a list for each argument
    (data_sources, solution_strs, ground_truths, extra_infos), returning a list."""
    terms: list[Any] = field(default_factory=list)
    """Several rewards added up: a list of {name, scorer or function (FILE.py:NAME or URL), weight, clip: [low, high],
    normalize: group or batch, options}. Each is logged as reward/<name>/mean."""
    max_concurrent: int | None = number(None, low=1)
    """Calls at one time of a remote or asynchronous reward function, a judge or a sandbox; null leaves it to them."""
    requests_per_minute: float | None = number(None, above=0)
    """Calls begun in a minute, spaced evenly; null is no limit."""
    scorer: str | None = named(None, "scorer")
    """Built-in scorer for every row; null means the one registered for the row's data_source."""
    scorer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the built-in scorer, for example {method: flexible} for gsm8k."""
    overlong_buffer: OverlongBufferConfig = block(OverlongBufferConfig)
    """Punishment of responses that are nearly too long."""
    sandbox: SandboxConfig = block(SandboxConfig)
    """Where model-written code runs."""
    sandbox_fusion: SandboxFusionConfig = block(SandboxFusionConfig)
    """A server that runs it instead."""
    judge: JudgeConfig = block(JudgeConfig)
    """A language model that judges responses (the scorer llm_judge)."""
    num_workers: int = number(2, low=1)
    """Worker processes that run a reward function of your own."""
    timeout: float = number(30.0, above=0)
    """Seconds one call may take."""
    on_error: str = choice("count", "count", "stop")
    """A call that raises, times out or returns no number: count it (score 0, reward/error_rate, first traceback in the
    log) or stop the run."""
    max_error_rate: float = number(0.5, low=0, high=1)
    """With on_error=count, stop the run when more than this share of a batch fails: nothing could be learned."""
