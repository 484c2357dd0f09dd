"""Objects that a user writes in notebook cells: a tool, a loop that calls it, an environment, a reward."""

from __future__ import annotations

from typing import Any

from hone.agents.environments import Environment, Step
from hone.agents.episode import Episode
from hone.agents.messages import AssistantTurn, Message, ToolCall
from hone.agents.tool_agent import ToolAgent


def double(number: int) -> int:
    """Double a number.

    Args:
        number: any number.
    """
    return 2 * number


class AlwaysCalls(ToolAgent):
    """A turn, a call of the tool, its result, a turn: with a model that knows nothing."""

    async def play(self, episode: Episode) -> None:
        """Play the episode."""
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            await self.take_turn(episode, tools.schemas)
            call = ToolCall("call_0", "double", {"number": 21}, "", None)
            episode.log.messages[-1]["tool_calls"] = [call.as_openai()]
            self.answer(episode, await tools.answer([call]), tools.schemas)
            await self.take_turn(episode, tools.schemas)


def tool_answered(solution_str: str, extra_info: dict[str, Any], **unused: object) -> dict[str, float]:
    """Score an episode by the result of its tool call."""
    messages = extra_info.get("episode", {"messages": []})["messages"]  # the checks before a run have no episode
    answers = [message["content"] for message in messages if message["role"] == "tool"]
    return {"score": float(answers == ["42"]) + 0.001 * len(solution_str), "answered": float(answers == ["42"])}


class Echo(Environment):
    """Asks for a number of turns and pays each."""

    def __init__(self, turns: int = 2) -> None:
        self.turns, self.left = turns, turns

    async def reset(self, seed: int) -> list[Message]:
        """Show the seed."""
        return [{"role": "user", "content": f"Say {seed}."}]

    async def step(self, turn: AssistantTurn) -> Step:
        """Pay the turn."""
        self.left -= 1
        reward = 1.0 + 0.001 * len(turn.content)
        return Step(reward=reward, done=True) if self.left == 0 else Step.says("Again.", reward=reward)
