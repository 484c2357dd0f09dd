"""Tasks for any environment, one problem per seed: ``environment:guess_the_number max_number=16``, ``self_play:tic_tac_toe``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from typing import Any

from hone.agents.environments.base import ENVIRONMENTS, make_environment
from hone.agents.environments.game import Game
from hone.agents.environments.guess_the_number import GuessTheNumber
from hone.agents.environments.planning import Planning
from hone.agents.messages import AssistantTurn, Message
from hone.agents.tasks.demonstrations import says
from hone.data.seeding import derive_seed
from hone.data.tasks.base import TASKS, Problem, json_options
from hone.errors import ConfigError
from hone.text import valid_data

_SEEDS = 2**31


class EnvironmentTask:
    """Task whose problems are seeds of an environment. Demonstrations are of guess_the_number, planning, and games against an opponent.

    Those of games are of random valid moves.

    Of its options two are the task's: ``random_demonstrations``, percent of guess_the_number's demonstrations that guess at random; and
    ``python``, the Python of an environment that runs in another one. With ``self_play`` the policy plays all seats.
    """

    def __init__(self, name: str, options: dict[str, Any], *, self_play: bool = False) -> None:
        self.careless = int(options.pop("random_demonstrations", 0))
        if not 0 <= self.careless <= 100:
            raise ConfigError(
                f"random_demonstrations={self.careless} is not in 0..100 percent", where=f"environment:{name}"
            )
        hosted = getattr(ENVIRONMENTS.get(name), "hosted", False)
        self.pythons = {name: str(options.pop("python"))} if hosted and "python" in options else {}
        self.name, self.options, self.self_play = name, options, self_play
        environment = make_environment(name, options, self.pythons)  # checks the options now
        if self_play and not isinstance(environment, Game):
            raise ConfigError(
                f"the environment '{name}' has no seats that the policy could all play",
                fix=f"environment:{name}",
                where=f"self_play:{name}",
            )
        self.data_source = f"environment/{name}"

    def problems(self, seed: int) -> Iterator[Problem]:
        """Draw problems without end; a question may recur with another seed."""
        number = 0
        while True:
            problem_seed = derive_seed(seed, "environment", self.name, number) % _SEEDS
            yield asyncio.run(self.problem(problem_seed))
            number += 1

    async def problem(self, seed: int) -> Problem:
        environment = make_environment(self.name, self.options, self.pythons)
        try:
            prompt = valid_data(await self._first(environment, seed))
            answer = await self._demonstration(environment, seed)
        finally:
            await environment.close()
        spec: dict[str, Any] = {"name": self.name, "seed": seed}
        if self.options:  # parquet cannot store an object without fields
            spec["options"] = self.options
        return Problem(
            str(prompt[-1]["content"]),
            "",
            None,
            {"environment": spec},
            prompt=prompt,
            answer=answer,
            tools=list(environment.tools) or None,
            agent_name="self_play" if self.self_play else "environment",
            key=f"{seed}",
        )

    async def _first(self, environment: Any, seed: int) -> list[Message]:
        if not self.self_play:
            return await environment.reset(seed)
        await environment.begin(seed)
        return [{"role": "user", "content": await environment.view()}]

    async def _demonstration(self, environment: Any, seed: int) -> list[Message] | None:
        if isinstance(environment, Planning):
            return [says(environment.solution())]
        if isinstance(environment, Game) and type(environment).moves is not Game.moves and not self.self_play:
            return await _random_moves(environment, random.Random(derive_seed(seed, "demonstration")))
        if not isinstance(environment, GuessTheNumber):
            return None
        careless = derive_seed(seed, "careless") % 100 < self.careless
        low, high, messages = 1, environment.max_number, []
        for turn in range(environment.guesses):
            guess = 1 + derive_seed(seed, "guess", turn) % environment.max_number if careless else (low + high) // 2
            messages.append(says(str(guess)))
            step = await environment.step(AssistantTurn(str(guess)))
            if step.done:
                break
            low, high = (guess + 1, high) if step.messages[0]["content"] == "higher" else (low, guess - 1)
            messages += step.messages
        return messages


async def _random_moves(game: Game, draw: random.Random) -> list[Message]:
    messages: list[Message] = []
    while game.mover is not None:
        messages.append(says(draw.choice(game.moves())))
        messages += (await game.step(AssistantTurn(messages[-1]["content"]))).messages
    return messages


@TASKS.register("environment")
def make(options: Sequence[str]) -> EnvironmentTask:
    """Build the task from ``dataset=NAME`` (from ``environment:NAME``) and the environment's options, values in JSON."""
    return _task("environment", options)


@TASKS.register("self_play")
def make_self_play(options: Sequence[str]) -> EnvironmentTask:
    """Build the task of a game whose seats the policy plays all, from the same options."""
    return _task("self_play", options)


def _task(kind: str, options: Sequence[str]) -> EnvironmentTask:
    values = json_options(options, task=kind, example="max_number=16")
    environment = values.pop("dataset", None)
    if environment is None:
        raise ConfigError(
            "the task has no environment", where=kind, fix=f"{kind}:<one of {', '.join(ENVIRONMENTS.names())}>"
        )
    return EnvironmentTask(str(environment), values, self_play=kind == "self_play")
