"""Services for scorers, created on first use: the sandbox, and a language model as judge at an OpenAI-compatible endpoint."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sqlite3
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hone.config.reward import JudgeConfig, RewardConfig
from hone.errors import NoVerdict, RewardError
from hone.rewards.http import JsonService, ServiceError, Throttle
from hone.rewards.rubric import Rubric
from hone.rewards.sandbox import Sandbox
from hone.rewards.sandbox.limits import Ending, Limits, Result


class FusionSandbox:
    """Client with the interface of :class:`~hone.rewards.sandbox.runner.Sandbox`.

    Args:
        url: URL of the server, with or without ``/run_code``.
        limits: limits of each program; the protocol supports time and memory.
    """

    def __init__(self, url: str, *, limits: Limits | None = None, max_concurrent: int = 64) -> None:
        self.limits = limits or Limits()
        base = url.rstrip("/").removesuffix("/run_code")
        self.service = JsonService(base, timeout=2 * self.limits.seconds + 30, retries=3)
        self._throttle = Throttle(max_concurrent)

    async def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, str] | None = None, limits: Limits | None = None
    ) -> Result:
        """Run a Python program; the result is broken if the server does not answer."""
        limits = limits or self.limits
        body = {
            "code": code,
            "language": "python",
            "stdin": stdin,
            "run_timeout": limits.seconds,
            "compile_timeout": limits.seconds,
            "memory_limit_MB": limits.memory_mb,
            "files": {
                name: base64.b64encode(text.encode(errors="surrogatepass")).decode()
                for name, text in (files or {}).items()
            },
        }
        async with self._throttle:
            try:
                answer = await self.service.post("/run_code", body)
            except ServiceError as error:
                return Result(Ending.BROKEN, error=str(error))
        return _result(answer)

    def close(self) -> None:
        """Do nothing; the client holds no resources."""


def _result(answer: Any) -> Result:
    run = answer.get("run_result") if isinstance(answer, Mapping) else None
    if not isinstance(run, Mapping):
        message = answer.get("message") if isinstance(answer, Mapping) else answer
        return Result(Ending.BROKEN, error=f"SandboxFusion: {str(message)[:200]}")
    stdout, stderr = str(run.get("stdout") or ""), str(run.get("stderr") or "")
    seconds = float(run.get("execution_time") or 0.0)
    if run.get("status") == "TimeLimitExceeded":
        return Result(Ending.TIMEOUT, None, stdout, stderr, seconds)
    if run.get("return_code") is None:
        return Result(Ending.BROKEN, None, stdout, stderr, seconds, f"SandboxFusion: {run.get('status')}")
    return Result(Ending.FINISHED, int(run["return_code"]), stdout, stderr, seconds)


class JudgementError(NoVerdict):
    """Error of a judge that gave no usable judgement."""

    cause = "service"


@dataclass(frozen=True)
class Judgement:
    """Judgement of one response."""

    score: float  # 0 to 1
    text: str
    prompt_tokens: int = 0  # 0 for a cached judgement, as those of the answer
    completion_tokens: int = 0
    cached: bool = False  # True if the judgement came from the cache


class Judge:
    """Client of a judge with a cache of its judgements.

    ``timeout``: seconds per try.

    Raises RewardError: no endpoint or model is set, or the rubric is unreadable or invalid.
    """

    def __init__(self, config: JudgeConfig, *, timeout: float) -> None:
        for key in ("base_url", "model"):
            if not getattr(config, key):
                raise RewardError(
                    f"the reward needs a judge, but reward.judge.{key} is not set",
                    why="without endpoint and model no response can be judged",
                    fix="reward.judge.base_url=http://HOST:PORT/v1 reward.judge.model=NAME",
                    where=f"reward.judge.{key}",
                )
        self.config, self.rubric = config, Rubric.from_config(config)
        self.service = JsonService(
            str(config.base_url), token=os.environ.get(config.api_key_env), timeout=timeout, retries=config.retries
        )
        self._cache = _Cache(config.cache)

    async def judge(self, question: str, response: str, ground_truth: Any) -> Judgement:
        """Judge one response.

        Raises JudgementError: the endpoint gives no answer, or the answer has no score between 0 and ``max_score``.
        """
        config = self.config
        body = {
            "model": config.model,
            "messages": [{"role": "user", "content": self.rubric.fill(question, response, ground_truth)}],
            "temperature": config.temperature,
            "max_tokens": config.max_tokens,
        }
        key = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        text = self._cache.get(key)
        if text is not None:
            return Judgement(self._score(text), text, cached=True)
        answer: Any = None
        try:
            answer = await self.service.post("/chat/completions", body)
            text = str(answer["choices"][0]["message"]["content"] or "")
        except ServiceError as error:
            raise JudgementError(f"the judge: {error}") from error
        except (KeyError, IndexError, TypeError) as error:
            raise JudgementError(f"the judge's answer is not a chat completion: {str(answer)[:200]}") from error
        usage = answer.get("usage") or {}
        score = self._score(text)  # only readable judgements are cached
        self._cache.put(key, text)
        return Judgement(score, text, int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))

    def close(self) -> None:
        self._cache.close()

    def _score(self, text: str) -> float:
        score = self.rubric.score(text)
        if score is None:
            raise JudgementError(f"the judge gave {self.rubric.missing(text)}")
        return score


class _Cache:
    """Cache of judgements by the hash of the request."""

    def __init__(self, path: str | None) -> None:
        self._lock = threading.Lock()
        try:
            self._table = sqlite3.connect(path or ":memory:", check_same_thread=False, timeout=30)
            with self._table:
                self._table.execute("CREATE TABLE IF NOT EXISTS judgements (asked TEXT PRIMARY KEY, said TEXT)")
        except sqlite3.Error as error:
            raise RewardError(
                f"{path} cannot be opened as a cache of judgements: {error}",
                fix="use another file",
                where="reward.judge.cache",
            ) from None

    def get(self, key: str) -> str | None:
        with self._lock:
            row = self._table.execute("SELECT said FROM judgements WHERE asked = ?", (key,)).fetchone()
        return row[0] if row else None

    def put(self, key: str, text: str) -> None:
        with self._lock, self._table:
            self._table.execute("INSERT OR REPLACE INTO judgements VALUES (?, ?)", (key, text))

    def close(self) -> None:
        self._table.close()


class Services:
    """Sandbox and judge of a run."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config

    @cached_property
    def sandbox(self) -> Sandbox | FusionSandbox:
        local, fusion = self.config.sandbox, self.config.sandbox_fusion
        if fusion.url is not None:
            limits = Limits(seconds=local.timeout, memory_mb=fusion.memory_limit_mb)
            return FusionSandbox(fusion.url, limits=limits, max_concurrent=fusion.max_concurrent)
        limits = Limits(seconds=local.timeout, memory_mb=local.memory_mb, processes=local.processes)
        return Sandbox(backend=local.backend, require=local.require, limits=limits, max_concurrent=local.max_concurrent)

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.config.judge, timeout=self.config.timeout)

    def close(self) -> None:
        for name in ("sandbox", "judge"):
            if name in vars(self):
                getattr(self, name).close()
