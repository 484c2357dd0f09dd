"""Sandbox on a SandboxFusion server instead of this machine (https://github.com/bytedance/SandboxFusion)."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from hone.rewards.http import JsonService, ServiceError, Throttle
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
