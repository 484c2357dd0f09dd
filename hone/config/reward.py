"""The block ``reward``: scoring of responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.config.engines import JudgeEngineConfig
from hone.config.fields import block, choice, choices, model_path, named, number
from hone.config.run import OwnPoolConfig


@dataclass
class SandboxConfig:
    """Sandbox for model-written code on this machine."""

    backend: str = choice("auto", "auto", "bubblewrap", "process")
    """auto: bubblewrap (namespaces: no network, a read-only file system) if it works, else a process with limits, run as another
    user if the trainer is root; the log and hone doctor show what that does not protect."""
    timeout: float = number(10.0, above=0)
    """Limit of wall time and of CPU time of a program in seconds."""
    require: list[str] = choices("network", "files", "processes", "memory", "disk")
    """Protections without which no run starts: hone doctor and docs/rewards.md say which of them this machine gives."""
    memory_mb: int = number(1024, low=32)
    """Memory limit of a program and its child processes, in MiB."""
    processes: int = number(32, low=1)
    """Most processes and threads of a program."""
    max_concurrent: int = number(8, low=1)
    """Most concurrent programs."""


@dataclass
class SandboxFusionConfig:
    """A SandboxFusion server that runs model-written code instead of this machine."""

    url: str | None = None
    """Address of the server; null runs code on this machine."""
    max_concurrent: int = number(64, low=1)
    """Most concurrent programs on the server."""
    memory_limit_mb: int = number(1024, low=32)
    """Memory limit of a program, in MiB."""


@dataclass
class JudgeConfig:
    """A language model that judges responses, at an OpenAI-compatible endpoint."""

    base_url: str | None = None
    """Address of the endpoint, up to /v1."""
    model: str | None = None
    """Name of the model at the endpoint."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key; without it no key is sent."""
    prompt: str | None = None
    """Text file with the rubric, in which {question}, {response} and {ground_truth} are replaced; null uses a general rubric with
    scores from 0 to 10."""
    max_score: float = number(10.0, above=0)
    """Score of a perfect response in the rubric; the reward is the judge's score divided by it."""
    temperature: float = number(0.0, low=0)
    """Temperature of the judge."""
    max_tokens: int = number(1024, low=1)
    """Most tokens of a judgement."""
    retries: int = number(4, low=0)
    """Retries when the endpoint is busy or unreachable."""
    cache: str | None = None
    """SQLite file that caches judgements for this run and later ones; null caches in this process only."""


@dataclass
class CustomRewardConfig:
    """A custom reward function."""

    path: str | None = None
    """Python file of the function, or the URL of a server that receives the arguments as JSON and returns the function's result;
    null uses the built-in scorer of each data_source."""
    name: str = "compute_score"
    """Name of the function: f(data_source, solution_str, ground_truth, extra_info) -> float or dict with "score"."""
    reward_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of every call."""

    @classmethod
    def named(cls, text: str | None) -> CustomRewardConfig:
        """Return the function that ``FILE:NAME`` names (``compute_score`` without a name), or none."""
        path, _, name = text.rpartition(":") if text and ":" in text else (text, "", "")
        return cls(path=path or None, name=name or cls.name)


def reward_keys(reward: str | Sequence[Any]) -> dict[str, Any]:
    """Return the keys that ``reward=...`` sets.

    >>> reward_keys("my.py:right")
    {'reward.custom_reward_function.path': 'my.py', 'reward.custom_reward_function.name': 'right'}
    >>> reward_keys("exact_match"), reward_keys("http://host/score")
    ({'reward.scorer': 'exact_match'}, {'reward.custom_reward_function.path': 'http://host/score'})
    >>> reward_keys(["exact_match", "my.py:short"])
    {'reward.terms': [{'scorer': 'exact_match'}, {'function': 'my.py:short'}]}
    """
    if not isinstance(reward, str):
        return {"reward.terms": [reward_term(one) if isinstance(one, str) else one for one in reward]}
    if "scorer" in reward_term(reward):
        return {"reward.scorer": reward}
    block = "reward.custom_reward_function"
    file, colon, name = ("", "", "") if "://" in reward or reward.endswith(".py") else reward.rpartition(":")
    return {f"{block}.path": file, f"{block}.name": name} if colon else {f"{block}.path": reward}


def reward_term(text: str) -> dict[str, Any]:
    """Return the entry of ``reward.terms`` of a scorer's name, a file with a function, or a URL."""
    function = ":" in text or text.endswith(".py")
    return {"function" if function else "scorer": text}


@dataclass
class OverlongBufferConfig:
    """Soft overlong penalty (DAPO), which grows over the last tokens before the limit."""

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
class DoctorConfig:
    """The environment doctor: finds defects of verifiers, tools and tasks while the run trains. See docs/rewards.md."""

    enable: bool = True
    """Observe episodes and verdicts, and log defects with their tasks; it changes neither rewards nor data."""
    probes_per_step: int = number(2, low=0)
    """Responses of each step that the verifier scores again in the background: unchanged, and with the answer to another prompt, an
    empty one and a traceback. 0 only observes. Judges, servers and asynchronous functions, whose calls may cost, are not probed."""
    cooldown: int = number(20, low=1)
    """Steps before the same kind of defect is reported again, for other tasks."""


@dataclass
class EpisodePricesConfig:
    """Prices of an episode of several turns, for the metric agent_loop/cost_aware_reward/mean. They change no reward."""

    per_1k_tokens: float = number(0.1, low=0)
    """Reward that a thousand tokens cost, those of tool results and users included."""
    per_second: float = number(0.01, low=0)
    """Reward that a second costs, from the start of an episode to its end."""


@dataclass
class RewardModelUseConfig(OwnPoolConfig):
    """A reward model: a scalar one, for example from `hone reward-model`, or a language model that writes judgements."""

    enable: bool = False
    """Score responses with a reward model."""
    path: str | None = model_path()
    """Directory of a sequence- or token-classification model with one label, and its tokenizer. With the policy's vocabulary it
    reads the sampled tokens, else prompt and answer are rendered with its chat template. With kind=generative a causal language
    model."""
    kind: str = choice("discriminative", "discriminative", "generative")
    """discriminative: the score is the output after the last token. generative: the model writes a judgement with the rubric of
    reward.judge (prompt, max_score, temperature, max_tokens) in an engine of its own, and the score, 0 to 1, is read from the text; a
    judgement without a score gives no verdict (reward.max_no_verdict_rate)."""
    rollout: JudgeEngineConfig = block(JudgeEngineConfig)
    """The engine that judges."""
    combine: str = choice("replace", "replace", "add")
    """replace: the model's score is the reward, and the scorer of the data_source is logged as reward/rule/mean; add: the
    two are added."""
    coef: float = number(1.0, above=0)
    """Factor of the model's score."""
    max_token_len_per_gpu: int | None = number(None, low=1)
    """Token budget of a micro-batch; null means the actor's. An engine judges nothing longer, and the native one, in the process of the
    reward model, judges answers of as many tokens at a time."""


@dataclass
class RewardConfig:
    """Scoring of responses."""

    custom_reward_function: CustomRewardConfig = block(CustomRewardConfig)
    """A custom reward function."""
    reward_model: RewardModelUseConfig = block(RewardModelUseConfig)
    """A trained reward model."""
    reward_manager: str = choice("naive", "naive", "prime", "dapo", "batch")
    """Calls of a custom reward function. naive and prime: once per response, in worker processes. dapo: the same, with the
    overlong penalty enabled. batch: once for all responses of a batch, with a list for each argument (data_sources,
    solution_strs, ground_truths, extra_infos); it returns a list."""
    terms: list[Any] = field(default_factory=list)
    """Sum of several rewards: a list of {name, scorer or function (FILE.py:NAME or URL), weight, clip: [low, high],
    normalize: group or batch, options}. Each is logged as reward/<name>/mean."""
    max_concurrent: int | None = number(None, low=1)
    """Most concurrent calls of a remote or asynchronous reward function, a judge or a sandbox; null means their default."""
    requests_per_minute: float | None = number(None, above=0)
    """Most calls started per minute, evenly spaced; null means no limit."""
    scorer: str | None = named(None, "scorer")
    """Built-in scorer for every row; null means the one registered for the row's data_source."""
    scorer_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra keyword arguments of the built-in scorer, for example {method: flexible} for gsm8k."""
    overlong_buffer: OverlongBufferConfig = block(OverlongBufferConfig)
    """Penalty for responses that are almost too long."""
    sandbox: SandboxConfig = block(SandboxConfig)
    """Sandbox for model-written code."""
    sandbox_fusion: SandboxFusionConfig = block(SandboxFusionConfig)
    """A server that runs model-written code."""
    judge: JudgeConfig = block(JudgeConfig)
    """A language model that judges responses (the scorer llm_judge)."""
    num_workers: int = number(2, low=1)
    """Worker processes for a custom reward function."""
    timeout: float = number(30.0, above=0)
    """Time limit of one call in seconds."""
    memory_mb: int | None = number(None, low=64)
    """Memory that a worker process and its children may hold during a call, in MiB; null means half of the memory of the machine
    or its container. A call that needs more fails, and its process is replaced."""
    max_output_kb: int | None = number(64, low=0)
    """KiB of printed text that each worker process may write to the log a minute; the rest is counted and not shown. null means no
    limit."""
    episode_prices: EpisodePricesConfig = block(EpisodePricesConfig)
    """Prices of an episode."""
    doctor: DoctorConfig = block(DoctorConfig)
    """The environment doctor."""
    max_retries: int = number(1, low=0)
    """Further tries of a response without a verdict, where the cause may pass: a time limit, a lost process, a judge, a sandbox."""
    max_no_verdict_rate: float = number(0.5, low=0, high=1)
    """Largest share of responses without a verdict, over the latest ones; above it the run stops. Such a response (its scoring
    failed, its episode broke, or the function returned None) is left out of its group and of training. 0 stops at the first."""
