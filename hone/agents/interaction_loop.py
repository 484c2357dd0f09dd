"""Conversations with a simulated user, who answers every turn of the policy; tools may be called in between."""

from __future__ import annotations

from functools import partial

from hone.agents.base import AGENT_LOOPS
from hone.agents.budget import BudgetSpent
from hone.agents.chat import ChatLoop
from hone.agents.episode import Episode
from hone.agents.interactions.base import Interaction
from hone.agents.setting import Setting
from hone.data.episode_log import EpisodeEnd
from hone.errors import DataError, did_you_mean


@AGENT_LOOPS.register("interaction")
class InteractionLoop(ChatLoop):
    """Turn, reply, turn, ... until the user has nothing more to say; a turn that calls tools is answered by them first.

    ``extra_info.interaction_kwargs`` of a row go to the user; its ``name`` chooses among several.
    """

    gives_reward = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.users = setting.interactions

    async def play(self, episode: Episode) -> None:
        """Play to the end."""
        several, kwargs = self.setting.multi_turn, dict(episode.sample.extra_info.get("interaction_kwargs") or {})
        user = self._user(kwargs.pop("name", None))
        state = await episode.outside(user.start(episode.sample, **kwargs), several.tool_timeout)
        episode.on_finish(partial(user.finish, state))
        async with self.setting.toolbox.session(episode, self.setting) as tools:
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
                f"interaction_kwargs names the user {name!r}, which the file does not have",
                why="nobody would answer the model",
                fix=did_you_mean(str(name), self.users),
                where="extra_info.interaction_kwargs.name",
                code="R48",
            )
        return self.users[name]
