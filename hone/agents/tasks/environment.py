"""Task for any environment, one problem per seed: ``environment:guess_the_number max_number=16``."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from hone.agents.environments.base import ENVIRONMENTS, make_environment
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
    """Task whose problems are seeds of an environment; guess_the_number and planning have demonstrations.

    Of its options ``random_demonstrations`` is the task's: percent of guess_the_number's demonstrations that guess at random.
    """

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        self.random = int(options.pop("random_demonstrations", 0))
        if not 0 <= self.random <= 100:
            raise ConfigError(
                f"random_demonstrations={self.random} is not in 0..100 percent", where=f"environment:{name}"
            )
        self.name, self.options = name, options
        make_environment(name, options)  # checks the options now
        self.data_source = f"environment/{name}"

    def problems(self, seed: int) -> Iterator[Problem]:
        """Draw problems without end; a question may recur with another seed."""
        number = 0
        while True:
            problem_seed = derive_seed(seed, "environment", self.name, number) % _SEEDS
            yield asyncio.run(self.problem(problem_seed))
            number += 1

    async def problem(self, seed: int) -> Problem:
        environment = make_environment(self.name, self.options)
        try:
            prompt = valid_data(await environment.reset(seed))
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
            agent_name="environment",
            key=f"{seed}",
        )

    async def _demonstration(self, environment: Any, seed: int) -> list[Message] | None:
        if isinstance(environment, Planning):
            return [says(environment.solution())]
        if not isinstance(environment, GuessTheNumber):
            return None
        careless = derive_seed(seed, "careless") % 100 < self.random
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


@TASKS.register("environment")
def make(options: Sequence[str]) -> EnvironmentTask:
    """Build the task from ``dataset=NAME`` (from ``environment:NAME``) and the environment's options, values in JSON."""
    values = json_options(options, task="environment", example="max_number=16")
    environment = values.pop("dataset", None)
    if environment is None:
        raise ConfigError(
            "the task has no environment",
            where="environment",
            fix=f"environment:<one of {', '.join(ENVIRONMENTS.names())}>",
        )
    return EnvironmentTask(str(environment), values)
