"""The four planning metrics, on episodes whose figures are known by hand."""

import pytest

from hone.config.reward import EpisodePricesConfig
from hone.data.episode_log import CallRecord, CallStatus, EpisodeEnd, EpisodeLog
from hone.data.types import Sample, StopReason, Trajectory
from hone.insight.episode_metrics import episode_metrics

PRICES = EpisodePricesConfig(per_1k_tokens=2.0, per_second=0.5)


def episode(index, tokens, seconds, log, part=0):
    sample = Sample("r", [1], None, "plans")
    mask = [1] * tokens
    return Trajectory(
        "r", index, [1], mask, mask, [0.0] * tokens, [0.0] * tokens, "", StopReason.STOP, sample, [], seconds, log, part
    )


def log(end=EpisodeEnd.ANSWER, turns=1, calls=(), **facts):
    records = [CallRecord("f", {}, status) for status in calls]
    return EpisodeLog([{"role": "assistant", "content": ""}], end, turns, calls=records, facts=facts)


def test_the_four_planning_metrics():
    played = [
        episode(0, 100, 1.0, log(turns=3, calls=(CallStatus.OK, CallStatus.OK))),
        episode(0, 50, 1.0, log(turns=3), part=1),  # the same episode after a rewrite
        episode(1, 400, 2.0, log(EpisodeEnd.TOKENS, turns=5, calls=(CallStatus.ERROR,))),
        episode(2, 10, 0.0, log(EpisodeEnd.DONE, turns=2, goals=0.25)),
        episode(3, 20, 0.0, log(turns=2, calls=(CallStatus.OK,))),
    ]
    metrics = episode_metrics(played, [1.0, 1.0, 0.5, 0.0, None], PRICES)
    assert metrics["tool/success_rate"] == 0.75
    assert metrics["tool/turns_per_solved"] == 4.0, "of the two episodes with a positive reward"
    assert metrics["episode/plan_completion"] == pytest.approx((1 + 0 + 0.25) / 3), "cut by a limit: not completed"
    costs = [2.0 * 0.15 + 0.5, 2.0 * 0.4 + 1.0, 2.0 * 0.01]
    assert metrics["agent_loop/cost_aware_reward/mean"] == pytest.approx((1.5 - sum(costs)) / 3)


def test_free_episodes_have_their_reward():
    free = EpisodePricesConfig(per_1k_tokens=0, per_second=0)
    metrics = episode_metrics([episode(0, 9, 5.0, log()), episode(1, 9, 5.0, log())], [0.5, 0.25], free)
    assert metrics["agent_loop/cost_aware_reward/mean"] == 0.375 and metrics["episode/plan_completion"] == 1.0


def test_without_a_verdict_nothing_is_claimed():
    metrics = episode_metrics([episode(0, 9, 1.0, log())], [None], PRICES)
    assert "episode/plan_completion" not in metrics and "agent_loop/cost_aware_reward/mean" not in metrics
