"""Agent loop for conversations with a simulated user, with optional tool calls."""

from __future__ import annotations

from functools import partial

from hone.agents.base import AGENT_LOOPS
from hone.agents.budget import BudgetSpent
from hone.agents.chat import ChatLoop
from hone.agents.context import EpisodeContext
from hone.agents.episode import Episode
from hone.agents.interactions.base import Interaction
from hone.data.episode_log import EpisodeEnd
from hone.errors import DataError, did_you_mean


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
