"""Environments on a real OpenEnv server, for tests: run with the Python in which openenv is installed.

python openenv_server.py KIND PORT        KIND is guess, moves or tools
"""

import random
import sys
from typing import Any, Literal

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    """Say a number."""

    message: str


class Heard(Observation):
    """What is answered."""

    reply: str


class Guess(Environment):
    """A number from 1 to 3 is to be found."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.number, self._state = 0, State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, highest: int = 3, **kwargs: Any) -> Heard:
        self.number = random.Random(seed).randint(1, highest)
        self._state = State(step_count=0)
        return Heard(reply=f"a number from 1 to {highest}")

    def step(self, action: Say, timeout_s: float | None = None, **kwargs: Any) -> Heard:
        self._state.step_count += 1
        if action.message == "crash":
            raise RuntimeError("the world came to its end")
        right = action.message.strip() == str(self.number)
        return Heard(reply="right" if right else "wrong", done=right, reward=1.0 if right else -0.1)

    @property
    def state(self) -> State:
        return self._state


class Move(Action):
    """Move on a line.

    More about it.
    """

    way: Literal["left", "right"]
    steps: int


class Seen(Observation):
    place: int
    goal: int


class Moves(Guess):
    """From 0 to the goal."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Seen:
        self.place, self.goal = 0, 1 + (seed or 0) % 4
        return Seen(place=0, goal=self.goal)

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Seen:
        self.place += action.steps if action.way == "right" else -action.steps
        there = self.place == self.goal
        return Seen(place=self.place, goal=self.goal, done=there, reward=float(there))


def tools() -> MCPEnvironment:
    server = FastMCP("adder")

    @server.tool
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    class Adder(MCPEnvironment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
            return Observation(metadata={"message": "ready"})

        def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
            raise ValueError(f"no such action: {action}")

        @property
        def state(self) -> State:
            return State()

    return Adder(server)


KINDS = {
    "guess": (Guess, Say, Heard),
    "moves": (Moves, Move, Seen),
    "tools": (tools, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    app = create_fastapi_app(*KINDS[sys.argv[1]], max_concurrent_envs=8)
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[2]), log_level="warning")
