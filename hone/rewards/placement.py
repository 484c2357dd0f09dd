"""Where a reward stands: on the last sampled token, unless its parts belong to turns or tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hone.data.types import Trajectory
from hone.rewards.outcome import failed
from hone.rewards.score import Score


def turn_ends(response_mask: Sequence[int]) -> list[int]:
    """The last token of each assistant turn: turns are runs of sampled tokens.

    >>> turn_ends([1, 1, 0, 0, 1, 0])
    [1, 4]
    """
    last = len(response_mask) - 1
    return [token for token, own in enumerate(response_mask) if own and (token == last or not response_mask[token + 1])]


def first_turns(trajectories: Sequence[Trajectory]) -> list[int]:
    """The number, within its episode, of each trajectory's first turn: not 0 where an episode left several parts."""
    order = sorted(range(len(trajectories)), key=lambda i: trajectories[i].part)
    counted: dict[tuple[str, int], int] = {}
    first = [0] * len(trajectories)
    for index in order:
        trajectory = trajectories[index]
        episode = (trajectory.uid, trajectory.index)
        first[index] = counted.get(episode, 0)
        counted[episode] = first[index] + len(turn_ends(trajectory.response_mask))
    return first


def place(score: Score, trajectory: Trajectory) -> Score:
    """Fill in ``placed`` from what a scorer said of turns and tokens; a response without tokens has no place for them.

    Returns:
        The score, or a failed one where it speaks of another number of turns or tokens than there are.
    """
    if not trajectory.response_ids:
        return score
    ends = turn_ends(trajectory.response_mask)
    for parts, positions, what in (
        (score.turn_rewards, ends, "turn"),
        (score.token_rewards, range(len(trajectory.response_ids)), "token"),
    ):
        if parts is None:
            continue
        if len(parts) != len(positions):
            return failed(f"returned {len(parts)} {what}_rewards for a response of {len(positions)} {what}s")
        add(score, zip(positions, parts, strict=True))
    return score


def add(score: Score, parts: Iterable[tuple[int, float]]) -> None:
    """Let parts of the total, pairs of token and reward, stand on their tokens."""
    for token, reward in parts:
        if reward:
            score.placed[token] = score.placed.get(token, 0.0) + reward


def token_rewards(score: Score, response_mask: Sequence[int]) -> dict[int, float]:
    """Every token that bears a reward; their sum is the total.

    What is placed on a token that the policy did not sample moves to the last sampled one before it, or else to the first.
    """
    sampled = [token for token, own in enumerate(response_mask) if own]
    last = sampled[-1] if sampled else len(response_mask) - 1
    rewards: dict[int, float] = {}
    for token, reward in score.placed.items():
        before = [position for position in sampled if position <= token]
        target = before[-1] if before else (sampled or [last])[0]
        rewards[target] = rewards.get(target, 0.0) + reward
    rest = score.total - sum(score.placed.values())
    rewards[last] = rewards.get(last, 0.0) + rest
    return rewards
