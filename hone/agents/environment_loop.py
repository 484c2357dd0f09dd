"""Agent loop for environments, which answer every policy turn and give it a reward."""

from __future__ import annotations

from typing import Any

from hone.agents.base import AGENT_LOOPS
from hone.agents.chat import ChatLoop
from hone.agents.environments.base import Environment, make_environment
from hone.agents.episode import Episode
from hone.agents.messages import Message
from hone.data.episode_log import EpisodeEnd
from hone.errors import DataError
from hone.text import valid_data


@AGENT_LOOPS.register("environment")
class EnvironmentLoop(ChatLoop):
    """Loop of reset, turn, step, turn, ... until the environment is done.

    ``extra_info.environment`` of a row is ``{"name": ..., "seed": ..., "options": {...}}``. The row's prompt must equal what
    ``reset(seed)`` returns; `hone data make environment:NAME` writes such rows.
    """

    gives_reward = True

    async def play(self, episode: Episode) -> None:
        limit = self.context.multi_turn.tool_timeout
        environment, seed = _environment_of_row(episode)
        episode.on_finish(environment.close)
        episode.log.reward = 0.0  # all rewards are those of turns
        _check_prompt(episode, valid_data(await episode.outside(environment.reset(seed), limit)))
        while True:
            turn = await self.take_turn(episode, environment.tools)
            step = await episode.outside(environment.step(turn), limit)
            episode.reward_turn(step.reward)
            episode.log.facts |= step.facts
            if step.done:
                break
            episode.count_user_turn()
            self.answer(episode, step.messages, environment.tools)
        episode.log.end = EpisodeEnd.DONE
        self.check_tokens(episode, environment.tools)


def _environment_of_row(episode: Episode) -> tuple[Environment, int]:
    spec: Any = episode.sample.extra_info.get("environment")
    if not isinstance(spec, dict) or "name" not in spec:
        raise DataError(
            f"row {episode.sample.uid} has no extra_info.environment",
            why="the loop 'environment' plays the environment that this field names",
            fix='add "environment": {"name": "guess_the_number", "seed": 1, "options": {}} to extra_info',
            where="extra_info.environment",
            code="R48",
        )
    return make_environment(spec["name"], spec.get("options") or {}), int(spec.get("seed") or 0)


def _check_prompt(episode: Episode, shown: list[Message]) -> None:
    row = episode.sample.messages or []
    if [(m["role"], m.get("content")) for m in row] != [(m["role"], m.get("content")) for m in shown]:
        raise DataError(
            f"the prompt of row {episode.sample.uid} differs from what its environment returns on reset: {shown!r:.300}",
            why="the policy would see one task and be scored on another",
            fix="make the dataset again with `hone data make environment:NAME`, with the same options",
            where="extra_info.environment",
        )
