"""The loop ``program``: an episode is one run of a program that only knows an OpenAI-compatible endpoint."""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hone.agents.base import AGENT_LOOPS, AgentLoop
from hone.agents.budget import BudgetSpent
from hone.agents.episode import Episode
from hone.agents.program.endpoint import MODEL, TrainingEndpoint
from hone.agents.program.process import Outcome, ProgramFailed, run_program
from hone.data.episode_log import EpisodeEnd
from hone.errors import ConfigError
from hone.registry import imported

if TYPE_CHECKING:
    from hone.agents.serving.session import Session

_KEY = "actor_rollout_ref.rollout.agent.program"
_THREADS = 256


@AGENT_LOOPS.register("program")
class ProgramLoop(AgentLoop):
    """Runs ``agent.program.command``, or calls ``agent.program.function``, once an episode.

    The agent builds its own prompts and carries out its own tools. Each of its calls is recorded as the tokens that the model
    was given and sampled; what it makes of one conversation is one trajectory, and if it begins several, or rewrites its history,
    they are parts of the episode.
    """

    gives_reward = True

    def __init__(self, setting: Any) -> None:
        super().__init__(setting)
        self._config = setting.agent.program
        if bool(self._config.command) == bool(self._config.function):
            raise ConfigError(
                "the agent loop 'program' needs a command or a function, and "
                + ("has both" if self._config.command else "has neither"),
                where=_KEY,
                fix=f"{_KEY}.command=[python,my_agent.py], or {_KEY}.function=my_agent:play",
            )
        self._endpoint: TrainingEndpoint | None = None

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        return imported(self._config.function, f"{_KEY}.function")

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="hone-agent")

    async def play(self, episode: Episode) -> None:
        """Run the agent; keep what it asked the model, and what it says of it."""
        if self._endpoint is None:
            self._endpoint = TrainingEndpoint(self.setting, episode.client)
        session = self._endpoint.open(episode)
        try:
            outcome = await episode.outside(self._run(episode, session), self._config.timeout)
        except TimeoutError:
            raise ProgramFailed(f"the agent took more than {self._config.timeout:g} s") from None
        except ProgramFailed:
            if not session.counts["refused"]:
                raise
            outcome = Outcome(reward=0.0)  # it did not get to its end: a limit stood before it
        finally:
            await self._endpoint.close(session)
            keep(session, episode)
        if not session.turns:
            raise ProgramFailed("the agent ended without asking the model anything")
        episode.log.reward, episode.answer = outcome.reward, outcome.text
        episode.log.facts |= outcome.facts
        if session.counts["refused"]:
            raise BudgetSpent(EpisodeEnd.TOKENS)

    async def _run(self, episode: Episode, session: Session) -> Outcome:
        assert self._endpoint is not None
        row = row_of(episode)
        if self._config.command:
            variables = {"OPENAI_BASE_URL": self._endpoint.url, "OPENAI_API_KEY": session.key, "OPENAI_MODEL": MODEL}
            command = [sys.executable if word == "python" else word for word in self._config.command]
            return await run_program(command, row, variables)
        call = functools.partial(self._function, row, base_url=self._endpoint.url, api_key=session.key, model=MODEL)
        try:
            if inspect.iscoroutinefunction(self._function):
                return Outcome.of(await call())
            return Outcome.of(await asyncio.get_running_loop().run_in_executor(self._threads, call))
        except (ProgramFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            raise ProgramFailed(f"the agent raised {type(error).__name__}: {error}") from error


def row_of(episode: Episode) -> dict[str, Any]:
    """What an agent is told of its episode."""
    sample = episode.sample
    return {
        "uid": sample.uid,
        "index": episode.index,
        "seed": episode.seed,
        "messages": sample.messages or [],
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def keep(session: Session, episode: Episode) -> None:
    """Put what a session recorded into the episode: its conversations become the parts."""
    ledgers = session.ledgers()
    if not ledgers:
        return
    episode.adopt(ledgers)
    last = session.turns[-1].messages
    first_reply = next(place for place, message in enumerate(last) if message["role"] == "assistant")
    episode.log.messages = last[first_reply:]
