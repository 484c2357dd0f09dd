"""Python tool: every call is a separate program in the sandbox."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hone.agents.tools.base import Tool, ToolError, text_schema
from hone.rewards.sandbox import Ending, Limits, Sandbox

_SCHEMA = text_schema("python", "Run a Python program and return what it prints.", "code", "the program")


class PythonTool(Tool):
    """Tool that runs programs without network and with limits on time, memory (MiB) and output; see :mod:`hone.rewards.sandbox`."""

    def __init__(
        self, *, backend: str = "auto", seconds: float = 10.0, memory_mb: int = 1024, max_concurrent: int = 8
    ) -> None:
        super().__init__(_SCHEMA)
        limits = Limits(seconds=seconds, memory_mb=memory_mb)
        self.sandbox = Sandbox(backend=backend, limits=limits, max_concurrent=max_concurrent)
        self.concurrency, self.retries = max_concurrent, 0

    async def execute(self, state: Any, arguments: Mapping[str, Any], **kwargs: Any) -> str:
        """Return the program's output; if it fails, also the last lines of its errors.

        Raises:
            ToolError: the program was stopped at a limit.
            NoVerdict: the sandbox failed.
        """
        result = (await self.sandbox.run(arguments["code"])).checked()
        if result.ending is not Ending.FINISHED:
            raise ToolError(f"the program was stopped: {result.ending.value}")
        if result.succeeded:
            return result.stdout or "(nothing was printed)"
        return f"{result.stdout}\n{result.stderr}".strip()

    def close(self) -> None:
        """Wait for running programs."""
        self.sandbox.close()
