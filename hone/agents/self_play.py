"""Agent loop ``self_play``: the policy plays all seats of a game, each in a conversation of its own."""

from __future__ import annotations

from hone.agents.base import AGENT_LOOPS
from hone.agents.environments.game import Game
from hone.agents.episode import Episode
from hone.agents.tool_agent import EnvironmentLoop, check_prompt, wrong_environment
from hone.data.episode_log import EpisodeEnd
from hone.text import valid_data


@AGENT_LOOPS.register("self_play")
class SelfPlay(EnvironmentLoop):
    """Loop of view, turn, view, turn, ... of the seats that move, until the game is over.

    A row is that of the loop ``environment``, whose prompt is what the seat that moves first is shown. The conversations are segments
    of one episode. The last turn of each seat has the seat's reward, and each turn has the seat as its role, so that an
    estimator can give every role its own return (``rae``). A game that a limit cuts short is worth 0 to all.
    """

    async def play(self, episode: Episode) -> None:
        game, seed = self.environment_of(episode)
        if not isinstance(game, Game):
            why = "self-play is of games: tic_tac_toe, kuhn_poker, textarena, or your own class derived from Game"
            raise wrong_environment(episode, "self_play", "has no seats", why)
        label = ":".join([str(episode.sample.extra_info["environment"]["name"]), *([game.id] if game.id else [])])
        limit = self.context.multi_turn.tool_timeout
        episode.on_finish(game.close)
        episode.log.reward = 0.0  # all rewards are those of turns
        seats: dict[int, Episode] = {}
        try:
            await episode.outside(game.begin(seed), limit)
            while (seat := game.mover) is not None:
                messages = valid_data([{"role": "user", "content": await episode.outside(game.view(), limit)}])
                if seat in seats:
                    seats[seat].count_user_turn()
                    self.answer(seats[seat], messages)
                elif seats:
                    seats[seat] = episode.child(messages, self.renderer.prompt(messages))
                else:
                    check_prompt(episode, messages)
                    seats[seat] = episode
                turn = await self.take_turn(seats[seat])
                await episode.outside(game.move(turn.content), limit)
            for seat, conversation in seats.items():
                conversation.reward_turn(game.rewards[seat])
                self.check_tokens(conversation)
            episode.log.facts |= game.facts | {f"seat{seat}": reward for seat, reward in enumerate(game.rewards)}
            episode.log.end = EpisodeEnd.DONE
        finally:
            for seat, conversation in seats.items():
                conversation.log.turn_roles = [f"{label}/{seat}"] * conversation.log.assistant_turns
            await episode.absorb_children()
