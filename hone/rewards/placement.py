"""Where a reward stands: on the last sampled token, unless its parts belong to turns or tokens."""

from __future__ import annotations

import dataclasses
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


def shared(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> list[Score]:
    """Let every episode have its reward once, however many parts it left.

    All parts of an episode get the score of the whole: what was said of its last part, and what the turns of the others earned.
    Each of these earnings stands in its own part, all else in the last one.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        rows.setdefault((trajectory.uid, trajectory.index), []).append(row)
    found, first = list(scores), first_turns(trajectories)
    for own in rows.values():
        if len(own) > 1:
            own = sorted(own, key=lambda row: trajectories[row].part)
            earned = [_earned(trajectories[row], first[row]) if scores[row].placed else {} for row in own]
            before = sum(sum(turns.values()) for turns in earned[:-1])
            whole = scores[own[-1]]
            for row, turns in zip(own[:-1], earned, strict=False):
                found[row] = _part(whole, before, turns, whole.total + before - sum(turns.values()))
            found[own[-1]] = _part(whole, before, whole.placed, before)
    return found


def _part(whole: Score, before: float, placed: dict[int, float], elsewhere: float) -> Score:
    if whole.error is not None:
        return whole
    unshaped = None if whole.unshaped is None else whole.unshaped + before
    terms = dict(whole.terms)
    if before:
        terms["turn_rewards"] = terms.get("turn_rewards", 0.0) + before
    return dataclasses.replace(
        whole, total=whole.total + before, unshaped=unshaped, terms=terms, placed=dict(placed), elsewhere=elsewhere
    )


def _earned(trajectory: Trajectory, first_turn: int) -> dict[int, float]:
    """What the turns of a part earned by themselves, on their last tokens."""
    if trajectory.episode is None:
        return {}
    ends = turn_ends(trajectory.response_mask)
    return dict(zip(ends, trajectory.episode.turn_rewards[first_turn : first_turn + len(ends)], strict=False))


def token_rewards(score: Score, response_mask: Sequence[int]) -> dict[int, float]:
    """Every token that bears a reward; their sum is the total, less what stands in other parts of the episode.

    What is placed on a token that the policy did not sample moves to the last sampled one before it, or else to the first.
    """
    sampled = [token for token, own in enumerate(response_mask) if own]
    last = sampled[-1] if sampled else len(response_mask) - 1
    rewards: dict[int, float] = {}
    for token, reward in score.placed.items():
        before = [position for position in sampled if position <= token]
        target = before[-1] if before else (sampled or [last])[0]
        rewards[target] = rewards.get(target, 0.0) + reward
    rest = score.total - sum(score.placed.values()) - score.elsewhere
    rewards[last] = rewards.get(last, 0.0) + rest
    return rewards
