"""Adapters for packages with their own dependencies: one process with their Python plays all episodes of this one.

Which Python that is says the configuration (``agent.environment_python``), never a dataset row.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
from pathlib import Path
from typing import Any

from hone.agents.environments.base import Environment, Step
from hone.agents.environments.game import Game
from hone.agents.messages import AssistantTurn, Message
from hone.agents.program.bridge import Bridge, start_bridge
from hone.agents.program.process import ProgramFailed
from hone.errors import ConfigError, NoVerdict

KEY = "actor_rollout_ref.rollout.agent.environment_python"
WHERE = "extra_info.environment.options"
_hosts: dict[str | None, Bridge] = {}
_sessions = itertools.count(1)


class EnvironmentFailed(NoVerdict):
    """Error of an environment's package, or of the process that runs it."""


class Session:
    """One game of a package, in the process of its Python."""

    def __init__(self, package: str, python: str | None) -> None:
        self.package, self.python = package, python
        self._number = next(_sessions)
        self._host: Bridge | None = None

    async def begin(self, name: str, seed: int, players: int, options: dict[str, Any]) -> dict[str, Any]:
        """Begin a game.

        Raises:
            ConfigError: the package does not have it, or cannot begin it with these options.
        """
        self._host = _host(self.python, self.package)
        state = await self._ask("begin", package=self.package, name=name, seed=seed, players=players, options=options)
        if "refused" in state:
            raise ConfigError(
                f"{self.package} cannot begin '{name}': {state['refused']}",
                fix=f"check id and options, and the package: {KEY}={{{self.package}: /path/to/venv/bin/python}}",
                where=WHERE,
            )
        return state

    async def move(self, text: str) -> dict[str, Any]:
        return await self._ask("move", text=text)

    async def close(self) -> None:
        if self._host is not None and self._host.alive:
            self._host.ask("end", session=self._number)

    async def _ask(self, op: str, **fields: Any) -> dict[str, Any]:
        assert self._host is not None, "the game has not begun"
        try:
            return await asyncio.wrap_future(self._host.ask(op, session=self._number, **fields))
        except ProgramFailed as failed:
            raise EnvironmentFailed(f"{self.package} failed: {failed}") from failed


def _host(python: str | None, package: str) -> Bridge:
    host = _hosts.get(python)
    if host is None or not host.alive:
        if not _hosts:
            atexit.register(close_hosts)
        why = f"{package} runs in the Python environment where it is installed"
        host = _hosts[python] = start_bridge(Path(__file__).with_name("host.py"), python, why, KEY)
    return host


def close_hosts() -> None:
    """End the processes of other Pythons."""
    while _hosts:
        _hosts.popitem()[1].close()


class TextArena(Game):
    """Game of TextArena: for one player, or for several in self-play.

    An invalid move is answered, and loses when it is repeated. Rewards are those of the package, known at the end. Facts: ``solved``,
    ``invalid_move``.
    """

    hosted = True

    def __init__(
        self,
        *,
        id: str,  # name in TextArena's registry, such as ``GuessTheNumber-v0``
        players: int = 1,
        seat: int | None = None,
        kwargs: dict[str, Any] | None = None,  # arguments of ``textarena.make``
        python: str | None = None,  # given by the configuration
    ) -> None:
        self.players = players
        super().__init__(seat=seat)
        self.id, self.kwargs = id, kwargs or {}
        self._session, self._state = Session("textarena", python), dict[str, Any]()

    async def begin(self, seed: int) -> None:
        self._state = await self._session.begin(self.id, seed, self.players, self.kwargs)

    @property
    def mover(self) -> int | None:
        return self._state["mover"]

    async def view(self) -> str:
        return str(self._state["text"])

    async def move(self, text: str) -> None:
        self._state = await self._session.move(text)

    @property
    def rewards(self) -> list[float]:
        return list(self._state["rewards"])

    @property
    def facts(self) -> dict[str, float]:
        return dict(self._state["facts"])

    async def close(self) -> None:
        await self._session.close()


class Gem(Environment):
    """Environment of GEM; each turn has the reward that the package gives it. Facts: ``solved`` (reward of at least 1), ``steps``."""

    hosted = True

    def __init__(self, *, id: str, kwargs: dict[str, Any] | None = None, python: str | None = None) -> None:
        if id.startswith("code:"):
            raise ConfigError(
                f"'{id}' runs programs of the model without a sandbox",
                fix="train on programs with the scorer `code`, see docs/rewards.md",
                where=f"{WHERE}.id",
            )
        self.id, self.kwargs = id, kwargs or {}
        self._session, self._total, self._steps = Session("gem", python), 0.0, 0

    async def reset(self, seed: int) -> list[Message]:
        state = await self._session.begin(self.id, seed, 1, self.kwargs)
        self._total, self._steps = 0.0, 0
        return [{"role": "user", "content": state["text"]}]

    async def step(self, turn: AssistantTurn) -> Step:
        state = await self._session.move(turn.content)
        before, self._total, self._steps = self._total, float(state["rewards"][0]), self._steps + 1
        reward = self._total - before
        facts = {"solved": float(reward >= 1.0), "steps": float(self._steps)}
        if state["mover"] is None:
            return Step(reward=reward, done=True, facts=facts)
        return Step.says(state["text"], reward=reward, facts=facts)

    async def close(self) -> None:
        await self._session.close()
