"""Rewards of several terms, and rewards that an episode brings itself."""

import asyncio
import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.config.reward import RewardConfig
from hone.data.episode_log import EpisodeLog
from hone.data.types import Sample, StopReason, Trajectory
from hone.errors import ConfigError, RewardError
from hone.rewards.http import Throttle
from hone.rewards.manager import Outcome, RewardManager
from hone.rewards.score import Cause, Score
from hone.rewards.terms import Term, combine, read_terms


def trajectory(text: str = "text", *, uid: str = "a", mask: tuple[int, ...] = (1,), log: EpisodeLog | None = None, part: int = 0) -> Trajectory:  # fmt: skip
    zeros = [0.0] * len(mask)
    sample = Sample(uid, [1], None, "exact", "text")
    return Trajectory(uid, 0, [1], [2] * len(mask), list(mask), zeros, zeros, text, StopReason.STOP, sample, episode=log, part=part)  # fmt: skip


def scored(config: RewardConfig, trajectories: list[Trajectory], **settings: Any) -> list[Score]:
    manager = RewardManager(config)
    try:
        return asyncio.run(manager.score(trajectories, **settings))
    finally:
        manager.close()


def test_terms_are_weighed_clipped_and_logged() -> None:
    terms = [
        {"scorer": "exact", "weight": 2.0},
        {
            "name": "short",
            "scorer": "length",
            "weight": -1,
            "options": {"max_chars": 2, "margin": 4},
            "clip": [0.0, 0.25],
        },
    ]
    right, wrong = scored(RewardConfig(terms=terms), [trajectory("text"), trajectory("other!")])
    assert right.total == pytest.approx(2.0 - 0.25) and wrong.total == pytest.approx(0.0)
    assert right.terms == {"exact": 1.0, "short": 0.5, "acc": 1.0, "format": 0.0, "chars": 4.0}
    assert right.extra == {"pred": "text"} and wrong.terms["short"] == 0.0


VALUES = st.lists(st.tuples(st.floats(-5, 5), st.sampled_from("abc")), min_size=1, max_size=12)


@given(VALUES, st.sampled_from([None, "group", "batch"]), st.floats(-2, 2), st.booleans())
def test_normalised_values_are_those_of_the_slow_way(
    values: list, normalize: str | None, weight: float, training: bool
) -> None:
    rows = [trajectory(uid=uid) for _, uid in values]
    column = [Score(value) for value, _ in values]
    found = combine([Term("x", "exact", normalize=normalize, weight=weight)], [column], rows, normalized=training)
    for (value, uid), score in zip(values, found, strict=True):
        peers = [v for v, other in values if normalize == "batch" or other == uid]
        expected = value
        if training and normalize and len(peers) > 1:
            spread = statistics.stdev(peers)
            expected = (value - statistics.fmean(peers)) / spread if spread > 1e-6 else 0.0
        assert score.total == pytest.approx(weight * expected, abs=1e-9)
        assert score.terms["x"] == value  # logged as it is


def test_a_term_that_fails_fails_the_whole_and_takes_no_part_in_the_mean() -> None:
    columns = [[Score(1.0), Score(3.0), Score(0.0, error="timeout: too long")], [Score(1.0)] * 3]
    terms = [Term("a", "exact", normalize="batch"), Term("b", "exact")]
    found = combine(terms, columns, [trajectory()] * 3, normalized=True)
    assert found[0].total == pytest.approx(1 - 0.5**0.5) and found[1].total == pytest.approx(1 + 0.5**0.5)
    assert found[2].error == "timeout: term a: too long" and found[2].total == 0.0


def test_rows_that_one_term_failed_and_another_skipped_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each term failed on another row, and left out the one after its first failure."""
    lost = Outcome(Score(0.0, error="timeout: too long", cause=Cause.TIMEOUT))
    columns = iter([[lost, None], [None, lost]])

    async def outcomes(source: Any, trajectories: list[Trajectory], allowed: int) -> list[Outcome | None]:
        return next(columns)

    monkeypatch.setattr(RewardManager, "_tried", lambda self, *given: outcomes(*given))
    terms = [{"scorer": "exact"}, {"scorer": "length", "options": {"max_chars": 9}}]
    config = RewardConfig(terms=terms, max_no_verdict_rate=0.0)
    with raises(RewardError, 2, "too long"):
        scored(config, [trajectory(), trajectory()])


@pytest.mark.parametrize("style", ["solution_str", "completions"])
def test_a_term_may_decline_most_answers(tmp_path: Path, style: str) -> None:
    """Two of three answers have no verdict of the second term; each keeps that of the first."""
    file = tmp_path / "own.py"
    file.write_text(
        "def all_of_them(solution_str, **more):\n    return 1.0\n"
        "def some(solution_str, **more):\n    return 1.0 if solution_str == 'a' else None\n"
        if style == "solution_str"
        else "def all_of_them(completions, **more):\n    return [1.0] * len(completions)\n"
        "def some(completions, **more):\n    return [1.0 if text == 'a' else None for text in completions]\n"
    )
    config = RewardConfig(terms=[{"function": f"{file}:all_of_them"}, {"function": f"{file}:some", "weight": 0.5}])
    texts = ["b", "c", "a"] * 40
    found = scored(config, [trajectory(text, uid=str(number)) for number, text in enumerate(texts)], training=True)
    assert [score.verdict for score in found] == [1.5 if text == "a" else 1.0 for text in texts]
    assert found[2].terms == {"all_of_them": 1.0, "some": 1.0} and found[0].terms == {"all_of_them": 1.0}


def test_placed_rewards_of_terms_keep_their_tokens() -> None:
    columns = [[Score(1.0, placed={0: 0.5})], [Score(2.0, placed={0: 1.0, 2: 1.0})]]
    (whole,) = combine([Term("a", weight=2.0), Term("b", weight=0.5)], columns, [trajectory()], normalized=False)
    assert whole.total == 3.0 and whole.placed == {0: 1.5, 2: 0.5}


@pytest.mark.parametrize(
    ("entry", "mentions"),
    [
        ("exact", ["reward.terms[0]", "exact"]),
        ({}, ["neither", "scorer", "function"]),
        ({"scorer": "exact", "function": "a.py:f"}, ["both", "scorer", "function"]),
        ({"scorer": "exact", "wieght": 1}, ["wieght", "weight"]),
        ({"scorer": "exact", "weight": "much"}, ["weight='much'"]),
        ({"scorer": "exact", "clip": [1]}, ["clip=[1]"]),
        ({"scorer": "exact", "clip": [1, 0]}, ["clip=[1, 0]"]),
        ({"scorer": "exact", "normalize": "all"}, ["normalize='all'", "group, batch"]),
        ({"scorer": "exact", "options": 3}, ["options=3"]),
    ],
)
def test_wrong_terms_are_refused(entry: Any, mentions: list[str]) -> None:
    with raises(ConfigError, *mentions, where="reward.terms[0]"):
        read_terms([entry])


def test_names_of_terms() -> None:
    terms = read_terms(
        [{"scorer": "exact"}, {"function": "dir/mine.py:f"}, {"function": "http://host:80/x", "name": "far"}]
    )
    assert [term.name for term in terms] == ["exact", "f", "far"]
    assert [term.name for term in read_terms([{"function": "dir/mine.py:compute_score"}])] == ["mine"]
    assert terms[1].function is not None and (terms[1].function.path, terms[1].function.name) == ("dir/mine.py", "f")
    assert terms[2].function is not None and terms[2].function.path == "http://host:80/x"
    with raises(ConfigError, "exact", where="reward.terms"):
        read_terms([{"scorer": "exact"}, {"scorer": "exact"}])
    with raises(ConfigError, "exakt", "exact"):
        RewardManager(RewardConfig(terms=[{"scorer": "exakt"}]))
    with raises(RewardError, "reward.terms", "reward.scorer=null"):
        RewardManager(RewardConfig(terms=[{"scorer": "exact"}], scorer="gsm8k"))
    with raises(RewardError, "limit", "exact", where="reward.scorer_kwargs"):
        RewardManager(RewardConfig(terms=[{"scorer": "exact", "options": {"limit": 3}}]))


# ------------------------------------------------------------------------------------------------------------ episodes


def test_turn_rewards_of_an_episode_are_placed_on_its_turns() -> None:
    log = EpisodeLog(assistant_turns=2, turn_rewards=[0.25, -0.5], facts={"solved": 1.0})
    (score,) = scored(RewardConfig(), [trajectory("text", mask=(1, 1, 0, 1), log=log)])
    assert score.total == 0.75 and score.placed == {1: 0.25, 3: -0.5}
    assert score.terms == {"solved": 1.0, "acc": 1.0, "format": 0.0, "turn_rewards": -0.25}


def test_an_episode_reward_counts_unless_a_scorer_is_configured() -> None:
    def played() -> list[Trajectory]:
        log = EpisodeLog(assistant_turns=2, turn_rewards=[0.0, 0.5], reward=0.25)
        return [trajectory("text", mask=(1, 0, 1), log=log), trajectory("text")]

    own, other = scored(RewardConfig(), played())
    assert (own.total, own.placed, other.total) == (0.75, {2: 0.5}, 1.0)
    assert scored(RewardConfig(scorer="exact"), played())[0].total == 1.5


def test_a_failed_episode_is_an_error_and_not_a_silent_zero() -> None:
    broken = trajectory(log=EpisodeLog(error="ToolCrash: gone\ntraceback"))
    first, second = scored(RewardConfig(), [broken, trajectory("text")])
    assert first.error is not None and first.error.endswith(": ToolCrash: gone") and second.total == 1.0
    with raises(RewardError, "1 of 1", "reward.max_no_verdict_rate="):
        scored(RewardConfig(max_no_verdict_rate=0.0), [broken])


def test_a_self_scored_source_needs_no_scorer() -> None:
    manager = RewardManager(RewardConfig())
    with raises(RewardError, "my_game", 3, code="R43"):
        manager.check({"my_game": 3})
    manager.check({"my_game": 3}, {"my_game"})
    assert list(manager.identity({"exact": 1, "my_game": 3})) == ["exact"]


# ------------------------------------------------------------------------------------------------------------ throttle


def test_a_throttle_serves_one_loop_after_another() -> None:
    throttle = Throttle(2, 6000)
    running = most = 0

    async def one() -> None:
        nonlocal running, most
        async with throttle:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.02)
            running -= 1

    async def several() -> None:
        await asyncio.gather(*(one() for _ in range(6)))

    for _ in range(2):
        asyncio.run(several())
    assert most == 2 and running == 0
    assert throttle.limits and not Throttle().limits and throttle.wait_seconds(3) == pytest.approx(0.03)


def test_a_term_that_declines_is_left_out_of_the_sum() -> None:
    terms = [Term("a", function=None, scorer="exact"), Term("b", scorer="exact", weight=0.5)]
    none = [Score(0.0, error="returned None", cause=cause) for cause in ("declined", "declined", "raised")]  # type: ignore[arg-type]
    rows = [trajectory(uid=name) for name in "xyz"]
    sums = combine(terms, [none, [Score(1.0), none[1], Score(1.0)]], rows, normalized=True)
    assert (sums[0].total, sums[0].error, sums[0].terms) == (0.5, None, {"b": 1.0})
    assert sums[1].cause == "declined" and sums[2].cause == "raised"


def test_functions_of_python_are_terms_with_weights() -> None:
    from hone.api.objects import GivenObjects, reward_keys

    def länge(completions: list[str], **columns: Any) -> list[float]:
        return [float(len(completion)) for completion in completions]

    def first(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if completion.startswith("x") else 1.0 for completion in completions]

    keys = reward_keys([länge, first, "exact"], GivenObjects(), [0.1, 1.0, 2.0])
    rows = [trajectory("ab", uid="a"), trajectory("x", uid="b")]
    assert [score.total for score in scored(RewardConfig(terms=keys["reward.terms"]), rows)] == pytest.approx(
        [1.2, 0.1]
    )
    assert [term.name for term in read_terms(keys["reward.terms"])] == ["länge", "first", "exact"]
    constants: list[Any] = [
        lambda completions, **k: [1.0] * len(completions),
        lambda completions, **k: [2.0] * len(completions),
    ]
    keys = reward_keys(constants, GivenObjects())
    assert [term.name for term in read_terms(keys["reward.terms"])] == ["lambda", "lambda_2"]
    assert [score.total for score in scored(RewardConfig(terms=keys["reward.terms"]), rows)] == [3.0, 3.0]
    with raises(ConfigError, "2 weights for 1", where="reward_weights"):
        reward_keys(länge, GivenObjects(), [1.0, 2.0])
    with raises(ConfigError, "int", "reward_weights"):
        reward_keys([länge, 3], GivenObjects())  # type: ignore[list-item]
