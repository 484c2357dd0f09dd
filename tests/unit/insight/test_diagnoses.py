"""Diagnoses while a run trains: a planted defect is named with its numbers, and a healthy run is silent."""

import pytest
from support.agents import call, play, sample, setting
from support.messages import raises

from hone.agents.tools.calculator import Calculator
from hone.config import RLConfig
from hone.data.ragged import Ragged
from hone.data.trajectories import to_batch
from hone.errors import InvariantError
from hone.insight.diagnoses import COOLDOWN, ZERO_STEPS, Diagnoses
from hone.insight.invariants import Invariants

HEALTHY = {
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "response_length/clip_ratio": 0.1,
    "rollout/stop_reason/length": 0.1,
    "actor/ratio/mean": 1.001,
    "actor/ratio/max": 1.8,
    "actor/first_ratio_max_abs_log": 1e-6,
    "actor/lr": 1e-5,
    "actor/grad_norm": 0.4,
    "training/rollout_probs_diff_mean": 1e-4,
    "training/staleness": 0.0,
    "tool/calls/mean": 1.5,
    "tool/malformed_rate": 0.02,
    "tool/error_rate": 0.05,
    "reward/format/mean": 0.9,
}
ZERO = {"critic/score/max": 0.0}


def with_tools():
    config = RLConfig()
    config.actor_rollout_ref.rollout.multi_turn.enable = True
    config.actor_rollout_ref.rollout.multi_turn.tool_config_path = "tools.yaml"
    return config


def observed(changes, steps=ZERO_STEPS, config=None):
    diagnoses = Diagnoses(config or with_tools())
    return [one for step in range(1, steps + 1) for one in diagnoses.observe(step, HEALTHY | changes)]


def test_a_healthy_run_is_silent(caplog):
    assert observed({}, steps=50) == [] and not caplog.records


@pytest.mark.parametrize(
    ("changes", "cause", "words"),
    [
        ({"response_length/clip_ratio": 0.75}, "length", ["75%", "data.max_response_length=1024"]),
        ({"episode/end/assistant_turns": 0.6}, "end_assistant_turns", ["60%", "multi_turn.max_assistant_turns"]),
        ({"episode/error_rate": 0.4}, "episode_errors", ["40%"]),
        ({"reward/no_verdict_rate": 0.3}, "no_verdict", ["30%"]),
        ({"tool/calls/mean": 0.0}, "no_calls", ["multi_turn.format"]),
        ({"tool/malformed_rate": 0.15, "tool/unknown_tool_rate": 0.1}, "unreadable_calls", ["15%", "10%"]),
        ({"tool/error_rate": 0.1, "tool/timeout_rate": 0.5}, "failing_tools", ["50%", "multi_turn.tool_timeout"]),
        ({"reward/format/mean": 0.04}, "format", ["4%", "reward.scorer"]),
        ({}, "too_hard", ["hone reward test", "data.sampler.name=stages"]),
    ],
)
def test_zero_reward_names_its_cause(changes, cause, words, caplog):
    (diagnosis,) = observed(ZERO | changes)
    assert diagnosis.name == "zero_reward" and [c.name for c in diagnosis.causes] == [cause]
    (record,) = caplog.records
    for word in (f"last {ZERO_STEPS} steps", *words):
        assert word in record.getMessage()


def test_several_causes_are_named_in_one_warning(caplog):
    (diagnosis,) = observed(ZERO | {"response_length/clip_ratio": 0.9, "reward/format/mean": 0.0})
    assert [cause.name for cause in diagnosis.causes] == ["length", "format"] and len(caplog.records) == 1


def test_a_single_reward_ends_the_count():
    diagnoses = Diagnoses(RLConfig())
    for step in range(1, 30):
        metrics = HEALTHY | (ZERO if step % ZERO_STEPS else {})
        assert diagnoses.observe(step, metrics) == []


def test_a_run_without_tools_needs_no_calls():
    (diagnosis,) = observed(ZERO | {"tool/calls/mean": 0.0}, config=RLConfig())
    assert [cause.name for cause in diagnosis.causes] == ["too_hard"]


def test_a_diagnosis_comes_again_after_its_cooldown():
    reports = []
    diagnoses = Diagnoses(RLConfig())
    for step in range(1, ZERO_STEPS + COOLDOWN + 1):
        reports += [step] * len(diagnoses.observe(step, HEALTHY | ZERO))
    assert reports == [ZERO_STEPS, ZERO_STEPS + COOLDOWN]


@pytest.mark.parametrize(
    ("changes", "causes", "words"),
    [
        ({"actor/ratio/mean": 5.2, "actor/ratio/max": 20}, ["learning_rate"], ["5.2", "optim.lr=1e-06"]),
        ({"actor/ratio/max": 1000.0}, ["learning_rate"], ["1e+03"]),
        ({"actor/ratio/mean": 0.1}, ["learning_rate"], ["0.1"]),
        ({"actor/ratio/max": 30.0, "actor/first_ratio_max_abs_log": 3.0}, ["first_update"], ["3", "D-ids"]),
        (
            {"actor/ratio/max": 30.0, "training/rollout_probs_diff_mean": 0.02, "training/staleness": 2.0},
            ["engine", "old_tokens", "learning_rate"],
            ["0.02", "max_staleness=0"],
        ),
    ],
)
def test_a_ratio_explosion_names_its_cause(changes, causes, words, caplog):
    (diagnosis,) = observed(changes, steps=1)
    assert diagnosis.name == "ratio_explosion" and [cause.name for cause in diagnosis.causes] == causes
    assert all(word in caplog.records[0].getMessage() for word in words)


def test_several_epochs_are_named_with_the_learning_rate():
    config = RLConfig()
    config.actor_rollout_ref.actor.ppo_epochs = 4
    (diagnosis,) = observed({"actor/ratio/max": 50.0}, steps=1, config=config)
    assert "ppo_epochs=1" in diagnosis.causes[0].fix


def test_tool_tokens_in_the_loss_stop_the_run():
    calls = lambda name, turn: call("calculator", expression="6*7") if turn == 0 else "#### 42"  # noqa: E731
    played, _ = play(setting([Calculator()]), calls, [sample(tools=[Calculator().schema])], n=2)
    batch, invariants = to_batch(played), Invariants()
    invariants.check_mask(batch)
    invariants.check_ids(batch)
    mask = batch.ragged("response_mask")
    given = int((mask.values == 0).sum())
    assert given > 0
    planted = batch.with_columns(response_mask=mask.with_values(mask.values * 0 + 1))
    for check in (invariants.check_mask, invariants.check_ids):
        with raises(InvariantError, f"{given} tokens in 2 rows", code="D-mask"):
            check(planted)
    one = mask.values.clone()
    first = int((mask.values == 0).nonzero()[0])
    one[first] = 1
    with raises(InvariantError, "1 tokens in 1 rows", code="D-mask") as caught:
        invariants.check_ids(batch.with_columns(response_mask=Ragged(one, mask.offsets)))
    assert "row 0" in caught.value.where
