"""The pilot: its probabilities against exact and simulated ones, and one real generation."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.launch import hone
from support.messages import check_message
from support.preflight import change

from hone.config import RLConfig
from hone.data.episode_log import CallRecord, CallStatus, EpisodeLog
from hone.data.types import Sample, StopReason, Trajectory
from hone.rewards.score import Score
from hone.trainers.pilot import GROUP_SIZES, dead_probability, describe, pilot_findings, summarise

MULTI = "actor_rollout_ref.rollout.multi_turn"


@given(passes=st.lists(st.integers(0, 6), min_size=1, max_size=40), n=st.integers(1, 40))
def test_probabilities_are_probabilities(passes, n):
    dead = dead_probability(passes, 6, n)
    assert -1e-9 <= dead <= 1 + 1e-9
    assert dead_probability(passes, 6, n + 1) <= dead + 1e-9, "larger groups die less often"
    assert dead == pytest.approx(dead_probability([6 - count for count in passes], 6, n)), "right and wrong are alike"
    assert dead_probability(passes, 6, 1) == pytest.approx(1.0), "a group of one is always dead"


def test_one_answer_a_prompt_takes_all_prompts_alike():
    assert dead_probability([1, 0, 0, 0, 0], 1, 2) == pytest.approx(0.2**2 + 0.8**2)
    assert dead_probability([0] * 5, 1, 8) == dead_probability([4] * 5, 4, 8) == 1.0


@pytest.mark.parametrize(("a", "b"), [(0.4, 1.2), (5.0, 3.0)])
def test_prompts_of_different_difficulty(a, b):
    """Pass rates drawn from a beta distribution: the fit finds the share of dead groups that it really gives."""
    draw = random.Random(0)
    rates = [draw.betavariate(a, b) for _ in range(4000)]
    passes = [sum(draw.random() < rate for _ in range(8)) for rate in rates]
    for n in GROUP_SIZES:
        true = sum(rate**n + (1 - rate) ** n for rate in rates) / len(rates)
        assert dead_probability(passes, 8, n) == pytest.approx(true, abs=0.02)
        mean = sum(rates) / len(rates)
        assert dead_probability(passes, 8, n) > mean**n + (1 - mean) ** n - 1e-9


def played(totals, lengths, cut=()):
    return [
        Trajectory(
            f"p{row}", index, [1] * 5, [1] * lengths[row][index], [], [], [], "",
            StopReason.LENGTH if (row, index) in cut else StopReason.STOP, Sample(f"p{row}", [], None, "x"),
        )
        for row in range(len(totals)) for index in range(len(totals[row]))
    ]  # fmt: skip


def test_numbers_and_warnings():
    totals, lengths = [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[3, 4], [5, 6], [7, 8], [9, 10]]
    trajectories = played(totals, lengths, cut={(0, 0), (1, 1), (3, 1)})
    scores = [Score(total) for group in totals for total in group]
    pilot = summarise(trajectories, scores, 2, generation_seconds=2.0, reward_seconds=3.0)
    assert (pilot.prompts, pilot.answers, pilot.tokens) == (4, 2, 52)
    assert pilot.pass_rate == 1 / 8 and pilot.cut == 3 / 8 and pilot.response_lengths["p100"] == 10
    config = change(RLConfig(), {"actor_rollout_ref.rollout.n": 2, "data.max_response_length": 10})
    found = {finding.error.code: finding.error for finding in pilot_findings(pilot, config)}
    assert set(found) == {"R20", "R64", "R53"}
    check_message(found["R20"], "12%", "n=2", f"{pilot.dead_groups[2]:.0%}")
    better = next(n for n in GROUP_SIZES if pilot.dead_groups[n] <= 0.5)
    check_message(found["R20"], f"rollout.n={better}", f"{pilot.dead_groups[better]:.0%}")
    check_message(found["R64"], "38%", "data.max_response_length=10", "data.max_response_length=20")
    check_message(found["R53"], "3.0 s", "2.0 s")
    text = describe(pilot, config)
    assert "4 prompts x 2 = 8 responses" in text and f"{pilot.dead_groups[8]:.0%} with n=8" in text


def called(statuses, cut=0):
    """An episode of calls: a list of statuses for each turn; the first ``cut`` results are cut."""
    calls = [CallRecord("f", {}, status, turn=turn) for turn, made in enumerate(statuses) for status in made]
    for call in calls[:cut]:
        call.truncated = True
    return EpisodeLog(calls=calls, assistant_turns=len(statuses))


@pytest.mark.parametrize(
    ("episodes", "limits", "words"),
    [
        (
            [called([[CallStatus.OK], [CallStatus.OK]], cut=1), called([[CallStatus.OK]]), None, None],
            {},
            ["33% of 3", "256 tokens", "max_tool_response_length=512"],
        ),
        (
            [called([[CallStatus.OK, CallStatus.OVER_LIMIT, CallStatus.OVER_LIMIT]]), called([[CallStatus.OK]]), None, None],
            {f"{MULTI}.max_parallel_calls": 1},
            ["50% of 4", "max_parallel_calls=1", "3", "max_parallel_calls=3"],
        ),
        (
            [called([[CallStatus.OK], [CallStatus.OVER_LIMIT]]), called([]), None, None],
            {f"{MULTI}.max_tool_calls": 1},
            ["50% of 2", "max_tool_calls=1", "max_tool_calls=2"],
        ),
        (
            [called([[CallStatus.OK] * 3, [CallStatus.OVER_LIMIT]]), called([]), None, None],
            {f"{MULTI}.max_tool_calls": 3},
            ["25% of 4", "max_tool_calls=3", "max_tool_calls=6"],
        ),
    ],
)  # fmt: skip
def test_limits_of_tools(episodes, limits, words):
    trajectories = played([[1.0, 0.0], [1.0, 0.0]], [[3, 3], [3, 3]])
    for trajectory, episode in zip(trajectories, episodes, strict=True):
        trajectory.episode = episode
    pilot = summarise(trajectories, [Score(1.0), Score(0.0)] * 2, 2, 2.0, 0.1)
    made = [len(episode.calls) for episode in episodes if episode]
    assert pilot.tools.calls == sum(made) and pilot.tools.episodes == sum(map(bool, made)) / 4
    config = change(RLConfig(), {"actor_rollout_ref.rollout.n": 8, **limits})
    (found,) = pilot_findings(pilot, config)
    assert found.error.code == "R37" and all(word in found.error.render() for word in words), found.error.render()
    assert f"tool calls         {sum(made)}, in {sum(map(bool, made)) / 4:.0%} of the episodes" in describe(
        pilot, config
    )


def test_tools_within_their_limits_are_silent():
    trajectories = played([[1.0, 0.0]], [[3, 3]])
    trajectories[0].episode = called([[CallStatus.OK] * 4])
    pilot = summarise(trajectories, [Score(1.0), Score(0.0)], 2, 2.0, 0.1)
    assert pilot_findings(pilot, change(RLConfig(), {"actor_rollout_ref.rollout.n": 8})) == []
    assert "4, in 50% of the episodes; 0% of the results cut" in describe(pilot, RLConfig())


def test_a_sound_start_is_silent():
    totals = [[1.0, 0.0, 1.0, 0.0]] * 4
    scores = [Score(total, terms={"acc": total}) for group in totals for total in group]
    pilot = summarise(played(totals, [[3] * 4] * 4), scores, 4, 2.0, 0.1)
    assert pilot.dead_groups[8] == pytest.approx(2 * 0.5**8)
    assert (
        math.isclose(pilot.pass_rate, 0.5)
        and pilot_findings(pilot, change(RLConfig(), {"actor_rollout_ref.rollout.n": 8})) == []
    )


@pytest.mark.slow
def test_one_real_generation(tmp_path):
    """From nothing to a pilot, as a user types it; nothing is trained."""
    steps = [
        ("data", "make", "digit_sequence", "length=4", "digits=2", "--out", tmp_path, "--size", 8, "--val-size", 4),
        ("data", "tokenizer", "--files", tmp_path / "train.parquet", "--out", tmp_path / "t", "--vocab-size", 280),
        ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", tmp_path / "t", "--out", tmp_path / "m"),
    ]
    for number, words in enumerate(steps):
        ended = hone(*words, log=tmp_path / f"{number}.log")
        assert ended.code == 0, ended.output
    ended = hone(
        "train", "--preset=grpo", "--pilot", f"data.train_files={tmp_path}/train.parquet", "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={tmp_path}/m", "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "data.max_response_length=8", f"trainer.default_local_dir={tmp_path}/run", "trainer.num_threads=1",
        log=tmp_path / "pilot.log",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    assert "pilot: 8 prompts x 8 = 64 responses" in ended.output and " with n=2, " in ended.output
    assert not (tmp_path / "run").exists()
