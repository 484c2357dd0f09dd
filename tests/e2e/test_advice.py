"""A planted fault, the advice of its alert followed change by change, and a run that recovers."""

import re
from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import make_tiny_runs, rl_words

from hone.insight.run_files import read_alerts

pytestmark = [pytest.mark.long("hone/insight/detectors"), pytest.mark.application("hone/insight")]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARDS = """
import zlib

answers = 0

def noise(solution_str, **row):
    return zlib.crc32(solution_str.encode()) % 100 / 100

def scale_changes(solution_str, **row):
    global answers
    answers += 1
    return (noise(solution_str) - 0.5) * (50 if answers > 150 else 1)

def often(solution_str, **row):
    return float(zlib.crc32(solution_str.encode()) % 97 != 0)

def late(solution_str, **row):
    return float(len(solution_str) > 60)

def rare(solution_str, **row):
    return float(zlib.crc32(solution_str.encode()) % 6 == 0)
"""
SETTING = re.compile(r"(?:^|[ ,])((?:[a-z_]+\.)+[a-z_]+=[^\s,;]+)")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_runs(tmp_path_factory.mktemp("tiny"), rewards=REWARDS)


def alternatives(cause: str) -> list[list[str]]:
    """Return the settings of each alternative of a fix."""
    parts = re.split(r",? or |; ", cause.partition(". Fix: ")[2])
    return [keys for part in parts if (keys := SETTING.findall(part))]


def reward(name: str) -> str:
    return f"custom_reward_function.name={name}"


PLANTED: dict[str, tuple[int, tuple[str, ...]]] = {
    "ratio_explosion": (4, (f"{ACTOR}.optim.lr=1.0", f"{ACTOR}.ppo_epochs=4")),
    "clip_fraction": (6, (f"{ACTOR}.optim.lr=0.03", f"{ACTOR}.ppo_epochs=6")),
    "policy_kl": (6, (f"{ACTOR}.optim.lr=0.03", f"{ACTOR}.ppo_epochs=3")),
    "zero_gradient": (4, (reward("often"), f"{ACTOR}.use_kl_loss=false")),
    "gradient_spike": (30, (reward("scale_changes"), "algorithm.norm_adv_by_std_in_grpo=false")),
    "advantage_shift": (30, (reward("scale_changes"), "algorithm.norm_adv_by_std_in_grpo=false")),
    "entropy_rise": (50, (reward("noise"), f"{ACTOR}.entropy_coeff=1.0", f"{ACTOR}.optim.lr=3e-4", f"{ROLLOUT}.temperature=0.2")),
    "entropy_collapse": (45, (reward("noise"), f"{ACTOR}.optim.lr=2e-2")),
    "engine_mismatch": (5, (f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.temperature=0.1")),
    "critic_lag": (32, (reward("noise"), "algorithm.adv_estimator=gae", "critic.optim.lr=1.0")),
    "flat_reward": (24, (reward("rare"), f"{ROLLOUT}.n=2", f"{ACTOR}.optim.lr=1e-6")),
    "zero_reward": (5, (reward("late"), "preflight.reward_rows=0")),
    "response_length": (14, (reward("noise"), "data.max_response_length=2")),
}  # fmt: skip
"""Steps and settings of each fault."""


@pytest.mark.parametrize("detector", PLANTED)
def test_a_run_recovers_by_the_advice_of_its_alert(tiny: Path, tmp_path: Path, detector: str) -> None:
    steps, fault = PLANTED[detector]
    words = [
        f"custom_reward_function.path={tiny}/rewards.py",
        reward("noise"),
        f"trainer.total_training_steps={steps}",
        *fault,
    ]
    followed: list[str] = []
    for turn in range(6):
        run = tmp_path / f"run{turn}"
        ended = hone(*rl_words(tiny, run, *words, *followed), log=run.with_suffix(".log"), cwd=tiny)
        assert ended.code == 0, ended.output
        alerts = [alert for alert in read_alerts(run) if alert["detector"] == detector]
        if not alerts:
            break
        change = next(
            (keys for cause in alerts[0]["causes"] for keys in alternatives(cause) if not set(keys) <= set(followed)),
            None,
        )
        assert change is not None, (followed, alerts[0]["causes"])
        followed += change
    else:
        pytest.fail(f"{detector} still fires after {followed}")
    assert followed, f"{detector} did not fire"
