"""Replay of recorded turns: the beginning of an episode token by token, before the engine continues it.

The agent loop runs as always. For the first turns the client returns the recorded tokens instead of asking the engine; tools and
environments are executed again. At each turn the tokens so far must equal the recorded ones, so the engine continues exactly the recorded
conversation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hone.agents.chat import ChatLoop, Tools
from hone.agents.client import EngineClient
from hone.agents.episode import Episode
from hone.agents.messages import Message
from hone.data.types import StopReason, Trajectory
from hone.errors import EpisodeError
from hone.generation.protocol import Completion, Engine, GenerationRequest


@dataclass(frozen=True)
class RecordedTurn:
    """One turn of the policy."""

    prompt_ids: list[int]  # all tokens before it
    token_ids: list[int]
    log_probs: list[float]  # of its tokens


def recorded_turns(segments: Sequence[Trajectory]) -> list[RecordedTurn]:
    """Return the turns of an episode, given its segments in order; a turn is a run of sampled tokens."""
    turns: list[RecordedTurn] = []
    for segment in segments:
        position = 0
        for sampled, run in itertools.groupby(segment.response_mask):
            stop = position + len(list(run))
            if sampled:
                before = [*segment.prompt_ids, *segment.response_ids[:position]]
                log_probs = segment.rollout_log_probs[position:stop]
                turns.append(RecordedTurn(before, segment.response_ids[position:stop], log_probs))
            position = stop
    return turns


class ReplayClient(EngineClient):
    """Client that answers the first ``count`` turns of every episode from a record.

    With ``changed`` the messages before turn ``count`` differ from the record.
    """

    def __init__(self, engine: Engine, turns: Sequence[RecordedTurn], count: int, *, changed: bool = False) -> None:
        super().__init__(engine)
        self._turns, self._count, self._changed = turns, count, changed
        self._taken: dict[str, int] = {}

    async def complete(self, request: GenerationRequest) -> Completion:
        """Return a recorded turn, or from turn ``count`` on the engine's completion.

        Raises:
            EpisodeError: the conversation differs from the recorded one.
        """
        turn = self._taken.get(request.request_id, 0)
        self._taken[request.request_id] = turn + 1
        if turn > self._count:
            return await super().complete(request)
        if not (self._changed and turn == self._count):
            self._check(turn, request.prompt_ids)
        if turn == self._count:
            return await super().complete(request)
        recorded = self._turns[turn]
        log_probs = list(recorded.log_probs)
        return Completion(request.request_id, list(recorded.token_ids), log_probs, list(log_probs), StopReason.STOP)

    def _check(self, turn: int, prompt_ids: Sequence[int]) -> None:
        if turn >= len(self._turns):
            return
        recorded = self._turns[turn].prompt_ids
        if list(prompt_ids) == recorded:
            return
        pairs = zip(recorded, prompt_ids, strict=False)
        place = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(recorded), len(prompt_ids)))
        raise EpisodeError(
            f"the conversation before turn {turn} differs from the recorded one at token {place} of {len(recorded)}",
            why="a tool, an environment or the chat template gives something else now, so the episode cannot be continued from its tokens",
            fix=f"fork at turn {max(0, turn - 1)} or earlier, or with the tools and template of the run",
            where=f"turn {turn}",
        )


def change_last_message(loop: ChatLoop, turn: int, content: str) -> None:
    """Let a loop give another content to the last message before turn ``turn`` of its episodes."""
    answer = loop.answer

    def changed(episode: Episode, messages: Sequence[Message], tools: Tools = ()) -> None:
        if episode.log.assistant_turns == turn and messages:
            last: dict[str, Any] = {**messages[-1], "content": content}
            messages = [*messages[:-1], last]
        answer(episode, messages, tools)

    loop.answer = changed  # type: ignore[method-assign]
