"""Values of turns by forks: a recorded episode is continued several times from a turn, and the mean reward is the turn's value.

Forked are turns that begin with a choice: the entropy of their first token's distribution is at least ``algorithm.forks.min_entropy``. That is known
before the turn is taken, so the choice of turns does not bias the advantages. Among more than ``max_turns`` such turns a hash decides.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hone.agents.player import Player
from hone.agents.replay import RecordedTurn, ReplayClient, recorded_turns
from hone.config.algorithm import ForksConfig
from hone.data.batch import Batch
from hone.data.seeding import derive_seed
from hone.data.trajectories import episode_rows, is_broken, to_batch
from hone.data.types import Sample
from hone.generation.protocol import Engine, SamplingParams


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
