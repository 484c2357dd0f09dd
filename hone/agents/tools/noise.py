"""Tools with random failures and delays, for training robust policies."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hone.agents.tools.base import Tool, ToolError
from hone.data.seeding import derive_seed
from hone.errors import DataError


@dataclass(frozen=True)
class NoiseOptions:
    """Rate of failures and delays of a tool."""

    failure_rate: float = 0.0  # share of failed calls; the model receives the error and may call again
    latency: float = 0.0  # mean seconds that a call waits, drawn from an exponential distribution
    seed: int = 0  # seed of the random numbers

    def __post_init__(self) -> None:
        if not 0 <= self.failure_rate <= 1 or self.latency < 0:
            raise ValueError(f"failure_rate={self.failure_rate} must be in 0..1, and latency={self.latency} at least 0")


@dataclass
class _State:
    inner: Any
    name: str
    calls: int = 0


class Noisy(Tool):
    """Tool with random failures and delays.

    Failures depend on ``options.seed``, the call's arguments and its number in the episode, so a run is reproducible.
    """

    def __init__(self, tool: Tool, options: NoiseOptions) -> None:
        super().__init__(tool.schema)
        self.tool, self.options = tool, options
        self.timeout, self.retries, self.concurrency = tool.timeout, tool.retries, tool.concurrency

    async def create(self, **kwargs: Any) -> _State:
        return _State(await self.tool.create(**kwargs), self.name)

    async def execute(self, state: _State, arguments: Mapping[str, Any], **kwargs: Any) -> Any:
        """Delay, fail or forward the call."""
        state.calls += 1
        draw = random.Random(
            derive_seed(self.options.seed, state.name, json.dumps(arguments, sort_keys=True), state.calls)
        )
        if self.options.latency:
            await asyncio.sleep(draw.expovariate(1 / self.options.latency))
        if draw.random() < self.options.failure_rate:
            raise ToolError("the service is not available, try again")
        return await self.tool.execute(state.inner, arguments, **kwargs)

    async def calc_reward(self, state: _State, **kwargs: Any) -> float | None:
        return await self.tool.calc_reward(state.inner, **kwargs)

    async def release(self, state: _State, **kwargs: Any) -> None:
        await self.tool.release(state.inner, **kwargs)

    def close(self) -> None:
        self.tool.close()


def with_noise(tool: Tool, options: Any) -> Noisy:
    """Return a tool with the noise that a dataset row asks for, which replaces the noise of the run."""
    return Noisy(tool.tool if isinstance(tool, Noisy) else tool, noise_of_row(tool.name, options))


def noise_of_row(name: str, options: Any) -> NoiseOptions:
    """Parse ``extra_info.tools_kwargs.<name>.noise`` of a row."""
    try:
        return NoiseOptions(**options)
    except (TypeError, ValueError) as problem:
        raise DataError(
            f"the noise of tool '{name}' is not valid: {problem}",
            fix='write {"failure_rate": 0.2, "latency": 0, "seed": 0}',
            where=f"extra_info.tools_kwargs.{name}.noise",
            code="R48",
        ) from problem
