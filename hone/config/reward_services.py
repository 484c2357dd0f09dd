"""Blocks of the RL tree about services of rewards outside the trainer: sandboxes for code, and judges."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choice, choices, number


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
