"""Where rewards stand: rows keep their sum, and only sampled tokens bear a reward."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import mentioned

from hone.data.episode_log import EpisodeLog
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.manager import first_turns, place, token_rewards, turn_ends
from hone.rewards.score import Score
from hone.rewards.worker import to_score, to_scores


def trajectory(mask: list[int], *, index: int = 0, part: int = 0, log: EpisodeLog | None = None) -> Trajectory:
    zeros = [0.0] * len(mask)
    sample = Sample("row", [1], None, "mine", "1")
    return Trajectory("row", index, [1], [5] * len(mask), mask, zeros, zeros, "text", StopReason.STOP, sample, episode=log, part=part)  # fmt: skip


def test_turns_are_runs_of_sampled_tokens() -> None:
    assert turn_ends([]) == [] and turn_ends([0, 0]) == [] and turn_ends([1]) == [0]
    assert turn_ends([0, 1, 1, 0, 1, 0, 0, 1]) == [2, 4, 7]


MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
REWARDS = st.floats(-8, 8, width=16)


@given(MASKS, REWARDS, st.data())
def test_a_row_keeps_its_sum_and_only_sampled_tokens_bear_rewards(mask: list[int], total: float, data) -> None:
    ends = turn_ends(mask)
    given_turns = data.draw(st.lists(REWARDS, min_size=len(ends), max_size=len(ends)))
    given_tokens = data.draw(st.lists(REWARDS, min_size=len(mask), max_size=len(mask)))
    score = place(Score(total, turn_rewards=given_turns, token_rewards=given_tokens), trajectory(mask))
    rewards = token_rewards(score, mask)
    assert sum(rewards.values()) == pytest.approx(total, abs=1e-9)
    if any(mask):
        assert all(mask[token] for token in rewards)
    expected = [0.0] * len(mask)
    for end, reward in zip(ends, given_turns, strict=True):
        expected[end] += reward
    last = max((token for token, own in enumerate(mask) if own), default=len(mask) - 1)
    first = next((token for token, own in enumerate(mask) if own), last)
    for token, reward in enumerate(given_tokens):
        expected[max((t for t in range(token + 1) if mask[t]), default=first)] += reward
    expected[last] += total - sum(given_turns) - sum(given_tokens)
    assert [rewards.get(token, 0.0) for token in range(len(mask))] == pytest.approx(expected, abs=1e-9)


def test_without_turn_rewards_the_last_sampled_token_has_the_reward() -> None:
    assert token_rewards(Score(2.0), [1, 1, 1]) == {2: 2.0}
    assert token_rewards(Score(2.0), [1, 1, 0]) == {1: 2.0}  # tool output at the end bears none
    assert token_rewards(Score(2.0), [0, 0]) == {1: 2.0}


def test_a_wrong_number_of_rewards_is_an_error() -> None:
    error = place(Score(1.0, turn_rewards=[1.0]), trajectory([1, 0, 1])).error
    assert error is not None and mentioned("1 turn_rewards", error) and mentioned("2 turns", error)
    assert "3 tokens" in str(place(Score(1.0, token_rewards=[]), trajectory([1, 0, 1])).error)


def test_turn_and_token_rewards_of_a_returned_dict() -> None:
    import numpy as np

    score = to_score({"score": 1, "turn_rewards": np.array([0.5, 1]), "token_rewards": (0, 1), "pred": "x"})
    assert (score.turn_rewards, score.token_rewards, score.terms) == ([0.5, 1.0], [0.0, 1.0], {})
    for wrong in ("12", [None], [float("nan")], 3):
        assert "turn_rewards" in str(to_score({"score": 1, "turn_rewards": wrong}).error)


def test_a_batch_gives_a_score_each_or_errors() -> None:
    assert [score.total for score in to_scores([1, {"score": 2}], 2)] == [1.0, 2.0]
    mixed = to_scores([1, None], 2)
    assert mixed[0].error is None and "None" in str(mixed[1].error)
    for wrong in ([1.0], 1.0, None, {"score": [1, 2]}):
        assert all("list of 2 scores" in str(score.error) for score in to_scores(wrong, 2))


def test_parts_of_an_episode_count_their_turns_on() -> None:
    parts = [trajectory([1, 0, 1], part=1), trajectory([1, 0, 1, 0, 1], part=0), trajectory([1], index=1)]
    assert first_turns(parts) == [3, 0, 0]


def test_a_response_without_tokens_keeps_its_score() -> None:
    assert place(Score(1.0, turn_rewards=[0.5]), trajectory([])) == Score(1.0, turn_rewards=[0.5])
