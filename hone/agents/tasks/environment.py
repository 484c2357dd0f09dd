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
from hone.agents.environments.proposals import Proposals
from hone.agents.messages import AssistantTurn, Message
from hone.agents.tasks.demonstrations import says
from hone.data.seeding import derive_seed
from hone.data.tasks.base import TASKS, Problem, json_options
from hone.errors import ConfigError
from hone.text import valid_data

_SEEDS = 2**31
_KINDS: dict[str, tuple[type, str]] = {
    "self_play": (Game, "has no seats that the policy could all play"),
    "proposer_solver": (Proposals, "takes no problems of the policy"),
}
"""Loops other than ``environment``: the class of their environments, and what another lacks."""


class EnvironmentTask:
    """Task whose problems are seeds of an environment, played by the agent loop ``loop``.

    Demonstrations are of guess_the_number, planning, games against an opponent (random valid moves), and of problems that the policy
    can write (solved, and with ``proposer_solver`` a random one).

    Of its options two are the task's: ``random_demonstrations``, percent of guess_the_number's demonstrations that guess at random; and
    ``python``, the Python of an environment that runs in another one.
    """

    def __init__(self, name: str, options: dict[str, Any], *, loop: str = "environment") -> None:
        self.careless = int(options.pop("random_demonstrations", 0))
        if not 0 <= self.careless <= 100:
            raise ConfigError(
                f"random_demonstrations={self.careless} is not in 0..100 percent", where=f"environment:{name}"
            )
        hosted = getattr(ENVIRONMENTS.get(name), "hosted", False)
        self.pythons = {name: str(options.pop("python"))} if hosted and "python" in options else {}
        self.name, self.options, self.loop = name, options, loop
        environment = make_environment(name, options, self.pythons)  # checks the options now
        if loop in _KINDS and not isinstance(environment, _KINDS[loop][0]):
            raise ConfigError(
                f"the environment '{name}' {_KINDS[loop][1]}", fix=f"environment:{name}", where=f"{loop}:{name}"
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
            agent_name=self.loop,
            key=f"{seed}",
        )

    async def _first(self, environment: Any, seed: int) -> list[Message]:
        if self.loop == "environment":
            return await environment.reset(seed)
        if self.loop == "proposer_solver":
            return [{"role": "user", "content": await environment.ask(seed)}]
        await environment.begin(seed)
        return [{"role": "user", "content": await environment.view()}]

    async def _demonstration(self, environment: Any, seed: int) -> list[Message] | None:
        if isinstance(environment, Planning):
            return [says(environment.solution())]
        if isinstance(environment, Proposals):
            return [says(environment.answer if self.loop == "environment" else environment.proposal(seed))]
        if isinstance(environment, Game) and type(environment).moves is not Game.moves and self.loop == "environment":
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


@TASKS.register("proposer_solver")
def make_proposer_solver(options: Sequence[str]) -> EnvironmentTask:
    """Build the task of an environment for which the policy writes the problems, from the same options."""
    return _task("proposer_solver", options)


def _task(kind: str, options: Sequence[str]) -> EnvironmentTask:
    values = json_options(options, task=kind, example="max_number=16")
    environment = values.pop("dataset", None)
    if environment is None:
        raise ConfigError(
            "the task has no environment", where=kind, fix=f"{kind}:<one of {', '.join(ENVIRONMENTS.names())}>"
        )
    return EnvironmentTask(str(environment), values, loop=kind)
