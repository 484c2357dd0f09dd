"""Blocks of the RL tree about what rewards ask outside the trainer: sandboxes for code, and judges."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import choice, number


@dataclass
class SandboxConfig:
    """Where model-written code runs on this machine."""

    backend: str = choice("auto", "auto", "bubblewrap", "process")
    """auto: bubblewrap (namespaces: no network, a read-only system) where it works, else a process with limits, and as
    another user where the trainer is root; what that does not protect is logged, and shown by hone doctor."""
    timeout: float = number(10.0, above=0)
    """Seconds of wall time and of processor time that a program may take."""
    memory_mb: int = number(1024, low=32)
    """Memory of a program and all it starts, in MiB."""
    processes: int = number(32, low=1)
    """Processes and threads of a program."""
    max_concurrent: int = number(8, low=1)
    """Programs that run at one time."""


@dataclass
class SandboxFusionConfig:
    """A SandboxFusion server that runs model-written code in place of this machine."""

    url: str | None = None
    """Address of the server; null runs code here."""
    max_concurrent: int = number(64, low=1)
    """Programs that run there at one time."""
    memory_limit_mb: int = number(1024, low=32)
    """Memory of a program, in MiB."""


@dataclass
class JudgeConfig:
    """A language model that judges responses, behind an OpenAI-compatible endpoint."""

    base_url: str | None = None
    """Address of the endpoint, up to /v1."""
    model: str | None = None
    """Name of the model there."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; none is sent where it is not set."""
    prompt: str | None = None
    """Text file with the rubric, in which {question}, {response} and {ground_truth} are filled in; null uses a general one,
    that asks for a score from 0 to 10."""
    max_score: float = number(10.0, above=0)
    """Score of a perfect response by the rubric; the reward is the judge's score over it."""
    temperature: float = number(0.0, low=0)
    """Temperature of the judge."""
    max_tokens: int = number(1024, low=1)
    """Most tokens of a judgement."""
    retries: int = number(4, low=0)
    """Tries after the first, where the endpoint is busy or away."""
    cache: str | None = None
    """File (SQLite) of judgements, for this run and later ones; null remembers those of this process only."""
