"""The built-in agent loops next to the tool agent, and the default for rows without ``agent_name``."""

from __future__ import annotations

from functools import partial
from typing import Any

from hone.agents.base import AGENT_LOOPS, AgentLoop
from hone.agents.budget import BudgetSpent
from hone.agents.chat import ChatLoop
from hone.agents.context import EpisodeContext
from hone.agents.environments.base import Environment, make_environment
from hone.agents.episode import Episode
from hone.agents.interactions.base import Interaction
from hone.agents.messages import Message
from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.data.episode_log import EpisodeEnd
from hone.errors import DataError, did_you_mean
from hone.text import valid_data

AGENT_LOOPS.register_later("hone.agents.tool_agent", "tool_agent")
# they play through an HTTP endpoint, which no other loop needs
AGENT_LOOPS.register_later("hone.agents.program.loop", "program")
AGENT_LOOPS.register_later("hone.agents.program.verifiers_loop", "verifiers")


@AGENT_LOOPS.register("single_turn", "single_turn_agent")
class SingleTurn(AgentLoop):
    several_turns = False

    async def play(self, episode: Episode) -> None:
        await episode.generate()


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


@AGENT_LOOPS.register("interaction")
class InteractionLoop(ChatLoop):
    """Loop of turn, reply, turn, ... until the user is done; tool calls are answered before the user.

    ``extra_info.interaction_kwargs`` of a row are passed to the user; its ``name`` chooses one of several users.
    """

    gives_reward = True

    def __init__(self, context: EpisodeContext) -> None:
        super().__init__(context)
        self.users = context.interactions

    async def play(self, episode: Episode) -> None:
        several, kwargs = self.context.multi_turn, dict(episode.sample.extra_info.get("interaction_kwargs") or {})
        user = self._user(kwargs.pop("name", None))
        state = await episode.outside(user.start(episode.sample, **kwargs), several.tool_timeout)
        episode.on_finish(partial(user.finish, state))
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            while True:
                turn = await self.take_turn(episode, tools.schemas)
                if turn.calls and tools.schemas:
                    if tools.exhausted:
                        raise BudgetSpent(EpisodeEnd.TOOL_CALLS)
                    self.answer(episode, await tools.answer(turn.calls), tools.schemas)
                    continue
                reply = await episode.outside(user.reply(state, episode.messages), several.tool_timeout)
                episode.reward_turn(reply.reward)
                episode.log.facts |= reply.facts
                if reply.done or reply.content is None:
                    break
                episode.count_user_turn()
                self.answer(episode, [{"role": "user", "content": reply.content}], tools.schemas)
            episode.log.end = EpisodeEnd.DONE
            self.check_tokens(episode, tools.schemas)

    def _user(self, name: str | None) -> Interaction:
        if name is None and len(self.users) == 1:
            return next(iter(self.users.values()))
        if name not in self.users:
            raise DataError(
                f"interaction_kwargs has name={name!r}, which is not a user of the interaction file",
                why="no user would answer the model",
                fix=did_you_mean(str(name), self.users),
                where="extra_info.interaction_kwargs.name",
                code="R48",
            )
        return self.users[name]


def default_loop(multi_turn: MultiTurnConfig, agent: AgentConfig) -> str:
    """Return the loop for rows without ``agent_name``: the configured default, else the one that the given files imply."""
    if agent.default_agent_loop is not None:
        return agent.default_agent_loop
    if agent.program.command or agent.program.function:
        return "program"
    if multi_turn.enable and multi_turn.interaction_config_path:
        return "interaction"
    if multi_turn.enable and (multi_turn.tool_config_path or multi_turn.function_tool_path):
        return "tool_agent"
    return "single_turn"
