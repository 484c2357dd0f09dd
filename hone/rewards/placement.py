"""Assignment of rewards to tokens: the last sampled token, unless the reward has turn or token rewards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from hone.data.types import Trajectory
from hone.rewards.outcome import failed
from hone.rewards.score import Score


def turn_ends(response_mask: Sequence[int]) -> list[int]:
    """Return the last token of each assistant turn; a turn is a run of sampled tokens.

    >>> turn_ends([1, 1, 0, 0, 1, 0])
    [1, 4]
    """
    last = len(response_mask) - 1
    return [
        token
        for token, sampled in enumerate(response_mask)
        if sampled and (token == last or not response_mask[token + 1])
    ]


def first_turns(trajectories: Sequence[Trajectory]) -> list[int]:
    """Return the index of each trajectory's first turn in its episode, above 0 only for later segments."""
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
    """Fill ``placed`` from a scorer's turn and token rewards; a response without a mask, as in trials, stays unchanged.
    Returns the score, or a failed one if the number of rewards is not that of turns or tokens.
    """
    if not trajectory.response_mask:
        return score
    ends = turn_ends(trajectory.response_mask)
    for rewards, positions, unit in (
        (score.turn_rewards, ends, "turn"),
        (score.token_rewards, range(len(trajectory.response_ids)), "token"),
    ):
        if rewards is None:
            continue
        if len(rewards) != len(positions):
            return failed(f"returned {len(rewards)} {unit}_rewards for a response of {len(positions)} {unit}s")
        place_rewards(score, zip(positions, rewards, strict=True))
    return score


def place_rewards(score: Score, rewards: Iterable[tuple[int, float]]) -> None:
    for token, reward in rewards:
        if reward:
            score.placed[token] = score.placed.get(token, 0.0) + reward


def share_rewards(trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> list[Score]:
    """Give every segment of an episode the reward of the complete episode.

    Segments of an episode share one score: the last segment's score plus the turn rewards of the others. Each turn reward is
    placed in its segment; all else in the last segment.
    """
    rows: dict[tuple[str, int], list[int]] = {}
    for row, trajectory in enumerate(trajectories):
        rows.setdefault((trajectory.uid, trajectory.index), []).append(row)
    shared, first = list(scores), first_turns(trajectories)
    for segment_rows in rows.values():
        if len(segment_rows) > 1:
            segment_rows = sorted(segment_rows, key=lambda row: trajectories[row].part)
            earned = [_earned(trajectories[row], first[row]) if scores[row].placed else {} for row in segment_rows]
            before = sum(sum(turns.values()) for turns in earned[:-1])
            complete = scores[segment_rows[-1]]
            for row, turns in zip(segment_rows[:-1], earned, strict=False):
                shared[row] = _segment_score(complete, before, turns, complete.total + before - sum(turns.values()))
            shared[segment_rows[-1]] = _segment_score(complete, before, complete.placed, before)
    return shared


def _segment_score(complete: Score, before: float, placed: dict[int, float], elsewhere: float) -> Score:
    if complete.error is not None:
        return complete
    unshaped = None if complete.unshaped is None else complete.unshaped + before
    terms = dict(complete.terms)
    if before:
        terms["turn_rewards"] = terms.get("turn_rewards", 0.0) + before
    return dataclasses.replace(
        complete,
        total=complete.total + before,
        unshaped=unshaped,
        terms=terms,
        placed=dict(placed),
        elsewhere=elsewhere,
    )


def _earned(trajectory: Trajectory, first_turn: int) -> dict[int, float]:
    """Return the turn rewards of a segment by the last token of each turn."""
    if trajectory.episode is None:
        return {}
    ends = turn_ends(trajectory.response_mask)
    return dict(zip(ends, trajectory.episode.turn_rewards[first_turn : first_turn + len(ends)], strict=False))


def token_rewards(score: Score, response_mask: Sequence[int]) -> dict[int, float]:
    """Return the reward of every token that has one; they sum to the total without rewards in other segments.

    A reward placed on a token that the policy did not sample moves to the last sampled token before it, else to the first.
    """
    sampled = [token for token, is_sampled in enumerate(response_mask) if is_sampled]
    last = sampled[-1] if sampled else len(response_mask) - 1
    rewards: dict[int, float] = {}
    for token, reward in score.placed.items():
        before = [position for position in sampled if position <= token]
        target = before[-1] if before else (sampled or [last])[0]
        rewards[target] = rewards.get(target, 0.0) + reward
    rest = score.total - sum(score.placed.values()) - score.elsewhere
    rewards[last] = rewards.get(last, 0.0) + rest
    return rewards
