"""Values of turns by forks: a recorded episode is continued several times from a turn, and the mean reward is the turn's value.

Forked are turns that begin with a choice: the entropy of their first token's distribution is at least ``algorithm.forks.min_entropy``. That is known
before the turn is taken, so the choice of turns does not bias the advantages. Among more than ``max_turns`` such turns a hash decides.

Replay of recorded turns: the beginning of an episode token by token, before the engine continues it.

The agent loop runs as always. For the first turns the client returns the recorded tokens instead of asking the engine; tools and
environments are executed again. At each turn the tokens so far must equal the recorded ones, so the engine continues exactly the recorded
conversation.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.agents.episode import EngineClient, Episode
from hone.agents.messages import Message
from hone.agents.player import Player
from hone.agents.tool_agent import ChatLoop, Tools
from hone.config.algorithm import ForksConfig
from hone.data.batch import Batch, episode_rows, is_broken, to_batch
from hone.data.seeding import derive_seed
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import EpisodeError
from hone.generation.protocol import Completion, Engine, GenerationRequest, SamplingParams


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


@dataclass(frozen=True)
class ForkPoint:
    """A turn of an episode from which it is continued."""

    uid: str  # group of the continuations
    rows: list[int]  # rows of the episode's segments in the batch
    turn: int  # number of turns before it
    turns: list[RecordedTurn]  # recorded turns of the episode
    sample: Sample  # dataset row with the recorded prompt


def fork_points(batch: Batch, settings: ForksConfig, seeding: tuple[Any, ...]) -> list[ForkPoint]:
    """Return the turns of a batch to fork, in the order of its rows; ``seeding`` are parts of the seed of the choice."""
    trajectories, entropy = batch.objects("trajectory"), batch.ragged("entropy")
    points: list[ForkPoint] = []
    for rows in episode_rows(batch):
        segments = [trajectories[row] for row in rows]
        if any(map(is_broken, segments)):
            continue
        turns = recorded_turns(segments)
        choices = [
            choice for row in rows for choice in _first_entropies(trajectories[row].response_mask, entropy.row(row))
        ]
        first = segments[0]
        sample = dataclasses.replace(first.sample, prompt_ids=list(first.prompt_ids))
        for turn, choice in enumerate(choices):
            if turn > 0 and choice >= settings.min_entropy:
                uid = f"{first.uid}^{first.index}.{turn}"
                points.append(ForkPoint(uid, rows, turn, turns, dataclasses.replace(sample, uid=uid)))
    drawn = sorted(points, key=lambda point: derive_seed(*seeding, "fork", point.uid))[: settings.max_turns]
    chosen = {point.uid for point in drawn}
    return [point for point in points if point.uid in chosen]


def _first_entropies(mask: Sequence[int], entropy: Any) -> list[float]:
    """Return the entropy before the first token of each turn."""
    values, before = entropy.tolist(), 0
    starts = []
    for place, sampled in enumerate(mask):
        if sampled and not before:
            starts.append(values[place])
        before = sampled
    return starts


async def play_forks(
    engine: Engine,
    player: Player,
    points: Sequence[ForkPoint],
    sampling: SamplingParams,
    n: int,
    seeding: tuple[Any, ...],
) -> Batch:
    """Continue every episode ``n`` times from its turn; a continuation that fails or does not repeat has an error."""
    context = copy.copy(player.context)  # the same tools and renderer
    context.agent = dataclasses.replace(context.agent, on_error="drop", max_retries=0)

    def seed_of(uid: str, index: int) -> int:
        return derive_seed(*seeding, "continued", uid, index)

    async def play(point: ForkPoint) -> list[Any]:
        forked = Player(engine, context, ReplayClient(engine, point.turns, point.turn))
        return await forked.play([point.sample], sampling, n=n, seed_of=seed_of)

    played = await asyncio.gather(*map(play, points))
    reads_images = context.image_processor is not None
    return to_batch([trajectory for trajectories in played for trajectory in trajectories], reads_images=reads_images)


def fork_rewards(batch: Batch) -> dict[str, list[float]]:
    """Return the rewards of continuations with a verdict, by the uid of their turn.

    A continuation contains the replayed turns, so its reward is that of the whole episode.
    """
    rewards: dict[str, list[float]] = {uid: [] for uid in batch.uids}
    for uid, part, score in zip(batch.uids, batch.tensor("part").tolist(), batch.objects("score"), strict=True):
        if part == 0 and score.error is None:
            rewards[uid].append(score.total)
    return rewards


def values_by_row(
    rows: int, points: Sequence[ForkPoint], rewards: Mapping[str, Sequence[float]]
) -> list[dict[int, float]]:
    """Return for each row of a batch the value of the forked turns of its episode: the mean reward of their continuations."""
    values: list[dict[int, float]] = [{} for _ in range(rows)]
    for point in points:
        if worth := rewards.get(point.uid):
            for row in point.rows:
                values[row][point.turn] = sum(worth) / len(worth)
    return values
