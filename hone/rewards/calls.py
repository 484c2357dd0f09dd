"""Arguments of reward functions, and concurrent calls of them."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from hone.data.answers import last_answer
from hone.data.types import Trajectory
from hone.insight import activity
from hone.rewards.signatures import CONVERSATIONS
from hone.rewards.target import ARGUMENTS, PLURALS, Outcome
from hone.rewards.throttle import Throttle


def arguments(trajectory: Trajectory) -> dict[str, Any]:
    """Return the arguments of a reward function.

    For a multi-turn episode, ``extra_info`` also has ``num_turns`` and ``episode``: its messages, tool calls, rewards and end
    (:meth:`~hone.data.episode_log.EpisodeLog.summary`), and what it cost: ``seconds`` by kind and tool, and ``tokens`` of the prompt,
    sampled and given (tool results, user turns) of this segment. ``last_answer`` is the last turn without thoughts and tool calls;
    an entry of the dataset with this name stays.
    """
    sample, extra = trajectory.sample, trajectory.sample.extra_info
    if trajectory.episode is not None and not trajectory.episode.is_plain:
        record = {**trajectory.episode.summary(), **trajectory.episode.costs(), "tokens": _tokens(trajectory)}
        extra = {**extra, "num_turns": trajectory.episode.num_turns, "episode": record}
    extra = {"last_answer": last_answer(trajectory.text, extra), **extra}
    return {
        "data_source": sample.data_source,
        "solution_str": trajectory.text,
        "ground_truth": sample.ground_truth,
        "extra_info": extra,
    }


def _tokens(trajectory: Trajectory) -> dict[str, int]:
    sampled = sum(trajectory.response_mask)
    return {
        "prompt": len(trajectory.prompt_ids),
        "sampled": sampled,
        "given": len(trajectory.response_mask) - sampled,
    }


def conversation(trajectory: Trajectory) -> dict[str, Any]:
    """Return what TRL's functions receive besides: messages of the prompt, of the episode after it, and the response's token ids.

    The messages of the prompt are None if it was text or token ids; those of the episode if it was one answer.
    """
    episode = trajectory.episode
    turns = None if episode is None or episode.is_plain else episode.messages or None
    return {"prompt": trajectory.sample.messages, "turns": turns, "ids": list(trajectory.response_ids)}


def with_conversation(trajectory: Trajectory) -> dict[str, Any]:
    """Return the arguments with the conversation."""
    return arguments(trajectory) | {CONVERSATIONS: [conversation(trajectory)]}


def batched(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the arguments of a reward function that scores all responses in one call."""
    rows = [arguments(trajectory) for trajectory in trajectories]
    return {plural: [row[name] for row in rows] for name, plural in zip(ARGUMENTS, PLURALS, strict=True)}


def batched_with_conversations(trajectories: Sequence[Trajectory]) -> dict[str, list[Any]]:
    """Return the arguments of one call for all responses, with their conversations."""
    return batched(trajectories) | {CONVERSATIONS: [conversation(trajectory) for trajectory in trajectories]}


def split(outcome: Outcome, count: int) -> list[Outcome | None]:
    """Split the outcome of one call into outcomes of its responses; all fail if the call failed."""
    if outcome.batch is None:
        return [Outcome(copy.deepcopy(outcome.score), outcome.traceback) for _ in range(count)]
    return [Outcome(score) for score in outcome.batch]


async def run_calls(
    calls: Sequence[Callable[[], Awaitable[Outcome]]], throttle: Throttle, allowed: int
) -> list[Outcome | None]:
    """Run the calls under the throttle.

    After more than ``allowed`` failures, calls not yet started are skipped (None).
    """
    outcomes: list[Outcome | None] = [None] * len(calls)
    failures = 0

    async def one(index: int) -> None:
        nonlocal failures
        async with throttle:
            if failures > allowed:
                return
            outcome = await calls[index]()
        outcomes[index] = outcome
        failures += outcome.score.error is not None
        activity.tick()

    await asyncio.gather(*(one(index) for index in range(len(calls))))
    return outcomes
