"""The sequential test: exact identities on enumerated cases, and its error rates in simulated twins."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.apps.lab.paired import Outcome, SequentialTest, SignBets, decide, forecast_pairs


def capitals(differences):
    bets, history = SignBets(), []
    for difference in differences:
        bets.add(difference)
        history.append((bets.positive, bets.negative, bets.either))
    return history


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=7))
def test_the_capital_is_a_martingale_when_signs_are_fair(sizes):
    """The mean over all sign patterns, which are equally likely, is 1 after every pair: exactly, for any sizes."""
    patterns = list(itertools.product((1, -1), repeat=len(sizes)))
    histories = [capitals([s * size for s, size in zip(signs, sizes, strict=True)]) for signs in patterns]
    for step in range(len(sizes)):
        for side in range(3):
            assert math.fsum(history[step][side] for history in histories) / len(patterns) == pytest.approx(1)


@given(st.lists(st.floats(0.01, 3), min_size=1, max_size=6), st.floats(0, 1))
def test_the_capital_shrinks_when_the_centre_is_on_the_other_side(sizes, centre):
    """Differences ``-centre + size`` and ``-centre - size``, equally likely: bets on positive ones lose on average.

    Only sizes up to the centre are compared with their mirror image, where one peak is not needed.
    """
    outcomes = itertools.product((1, -1), repeat=len(sizes))
    positive = [
        capitals([s * min(size, centre) - centre for s, size in zip(signs, sizes, strict=True)]) for signs in outcomes
    ]
    assert math.fsum(history[-1][0] for history in positive) / len(positive) <= 1 + 1e-9


def test_equal_arms_are_called_different_at_most_at_the_error_rate_exactly():
    """All 4,096 sign patterns of twelve differences, with the rule that stops at the first decision."""
    sizes = np.random.default_rng(0).gamma(1.0, 1.0, 12)
    wrong = 0
    for signs in itertools.product((1, -1), repeat=len(sizes)):
        test = SequentialTest(margin=1e-9, level=0.95)
        outcomes = (test.add(s * size) for s, size in zip(signs, sizes, strict=True))
        wrong += any(outcome in (Outcome.SECOND_BETTER, Outcome.FIRST_BETTER) for outcome in outcomes)
    assert 0 < wrong / 2**12 <= 0.05


@given(st.lists(st.integers(-999, 999).map(lambda n: n / 1000), min_size=1, max_size=12), st.floats(1e-3, 1e3))
def test_the_unit_of_the_score_and_the_names_of_the_arms_do_not_matter(differences, scale):
    decision = decide(differences, margin=0.1)
    scaled = decide([scale * value for value in differences], margin=0.1 * scale)
    assert (scaled.outcome, scaled.pairs) == (decision.outcome, decision.pairs)
    exchanged = decide([-value for value in differences], margin=0.1)
    other = {Outcome.SECOND_BETTER: Outcome.FIRST_BETTER, Outcome.FIRST_BETTER: Outcome.SECOND_BETTER}
    assert exchanged.outcome == other.get(decision.outcome, decision.outcome)
    as_loss = decide(differences, margin=0.1, more_is_better=False)
    assert (as_loss.outcome, as_loss.difference) == (exchanged.outcome, decision.difference)


def test_the_fewest_pairs():
    clear = decide([0.3] * 20, margin=0.02)
    assert (clear.outcome, clear.pairs) == (Outcome.SECOND_BETTER, 6) and 0.95 <= clear.confidence < 0.99
    equal = decide([0.0] * 20, margin=0.02)
    assert (equal.outcome, equal.pairs) == (Outcome.NO_DIFFERENCE, 5)
    assert decide([], margin=0.02).outcome is Outcome.STILL_NOISE


def test_undecided_pairs_say_how_many_more():
    undecided = [0.1, 0.12, 0.09]
    assert decide(undecided, margin=0.02).outcome is Outcome.STILL_NOISE
    assert forecast_pairs(undecided, margin=0.02) == 3  # six of one sign decide
    assert forecast_pairs([0.5, -0.5, 0.4, -0.4], margin=1e-3) is None
    assert forecast_pairs([0.1], margin=0.02) is None


def twins(generator, effect, *, pairs=60, prompts=64, seed_noise=0.02):
    """Mean differences of simulated twins: 0/1 scores of the same prompts, and noise between training runs."""
    difficulty = generator.beta(2, 2, prompts)
    shift = effect + generator.standard_t(4, (pairs, 1)) * seed_noise / math.sqrt(2)
    answers = generator.random((2, pairs, prompts))
    first, second = answers[0] < difficulty, answers[1] < np.clip(difficulty + shift, 0, 1)
    return (second.mean(1) - first.mean(1)).tolist()


def simulated(effect, margin):
    generator = np.random.default_rng(7)
    return [decide(twins(generator, effect), margin=margin) for _ in range(200)]


def test_200_equal_twins_stop_with_no_difference():
    counts = Counter(decision.outcome for decision in simulated(0.0, margin=0.1))
    assert counts[Outcome.NO_DIFFERENCE] >= 190
    assert counts[Outcome.SECOND_BETTER] + counts[Outcome.FIRST_BETTER] <= 10  # 5 % of 200


def test_a_planted_difference_is_seen_in_200_twins():
    counts = Counter(decision.outcome for decision in simulated(0.2, margin=0.1))
    assert counts[Outcome.SECOND_BETTER] >= 190 and counts[Outcome.FIRST_BETTER] == 0
    assert counts[Outcome.NO_DIFFERENCE] <= 10
    at_margin = Counter(decision.outcome for decision in simulated(0.1, margin=0.1))
    assert at_margin[Outcome.NO_DIFFERENCE] <= 10  # a difference of the margin is called none at the error rate
