"""Agent loop ``program``: an episode is one run of a program that uses the run's endpoint."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hone.agents.base import AGENT_LOOPS
from hone.agents.episode import Episode
from hone.agents.program.base import MODEL, EndpointLoop, row_of
from hone.agents.program.process import ProgramFailed, ProgramOutcome, run_program
from hone.errors import ConfigError
from hone.registry import imported

_KEY = "actor_rollout_ref.rollout.agent.program"
_THREADS = 256


def endpoint_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Return the environment variables by which clients of OpenAI and of Anthropic find the endpoint.

    Anthropic's clients add ``/v1`` to their base URL themselves. Both names of the key are set, so that none of the user's is sent.
    """
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,
        "ANTHROPIC_MODEL": MODEL,
    }


@AGENT_LOOPS.register("program")
class ProgramLoop(EndpointLoop):
    """Loop that runs ``agent.program.command`` or calls ``agent.program.function`` once per episode."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._config = context.agent.program
        if bool(self._config.command) == bool(self._config.function):
            raise ConfigError(
                "the agent loop 'program' needs either a command or a function, but "
                + ("has both" if self._config.command else "has neither"),
                where=_KEY,
                fix=f"{_KEY}.command=[python,my_agent.py], or {_KEY}.function=my_agent:play",
            )

    @property
    def timeout(self) -> float:
        return self._config.timeout

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        return imported(self._config.function, f"{_KEY}.function")

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="hone-agent")

    async def run(self, episode: Episode, *, base_url: str, api_key: str) -> ProgramOutcome:
        row = row_of(episode)
        if self._config.command:
            variables = endpoint_variables(base_url, api_key)
            command = [sys.executable if word == "python" else word for word in self._config.command]
            return await run_program(command, row, variables)
        call = functools.partial(self._function, row, base_url=base_url, api_key=api_key, model=MODEL)
        try:
            if inspect.iscoroutinefunction(self._function):
                return ProgramOutcome.parse(await call())
            return ProgramOutcome.parse(await asyncio.get_running_loop().run_in_executor(self._threads, call))
        except (ProgramFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            raise ProgramFailed(f"the agent raised {type(error).__name__}: {error}") from error
