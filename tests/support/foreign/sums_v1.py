"""A taskset of verifiers 0.4, for tests: sums, and a game whose environment answers; run with the Python in which it is installed."""

from __future__ import annotations

import verifiers.v1 as vf


class Data(vf.TaskData):
    """A sum, and its result."""

    answer: int = 0


class Sum(vf.Task[Data]):
    """Right where the result is said last."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = str(trace.assistant_messages[-1].content)
        if said == "crash":
            raise RuntimeError("the world came to its end")
        return float(said == str(self.data.answer))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(str(trace.assistant_messages[-1].content)))


class Config(vf.TasksetConfig):
    """How many sums there are; below 0 they never end."""

    count: int = 8


class Sums(vf.Taskset[Sum, Config]):
    """The sums of n and 3."""

    @property
    def bounded(self) -> bool:
        return self.config.count >= 0

    def load(self):
        n = 0
        while n != self.config.count:
            yield Sum(Data(prompt=f"What is {n} + 3?", answer=n + 3), self.config.task)
            n += 1


class GameConfig(vf.EnvConfig):
    """A player with two tries."""

    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[GameConfig]):
    """Two tries for each sum."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            if not segment.terminated and segment.last_reply != str(task.data.answer):
                await interaction.turn("Wrong. Try again.")


__all__ = ["Game", "Sums"]
