"""A planted fault, the advice of its alert followed change by change, and a run that recovers."""

import json
import re
from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import make_tiny_runs, rl_words

from hone.insight.run_files import read_alerts, read_metrics

pytestmark = [pytest.mark.long("hone/insight/detectors"), pytest.mark.application("hone/insight", "hone/apps/lab")]

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARDS = """
import os
import time
import zlib
from pathlib import Path

answers, kept = 0, []

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

def leaks(solution_str, **row):
    kept.append(b"x" * (3 << 20))
    return noise(solution_str)

def slow_late(solution_str, **row):
    with Path(__file__).with_name(f"answers{os.getppid()}").open("ab") as marks:  # of all workers of a run
        marks.write(b".")
        late = marks.tell() > 260
    time.sleep(0.4 * late)
    return noise(solution_str)

def loud_late(solution_str, **row):
    global answers
    answers += 1
    return (noise(solution_str) - 0.5) * (1 if answers > 264 else 1e-9)

def vowels(solution_str, **row):
    return sum(letter in "aeiou" for letter in solution_str) / 10

def task(solution_str, **row):
    return max(0.0, 1 - vowels(solution_str) / 2)

def hacked(solution_str, **row):
    return {"score": task(solution_str) + vowels(solution_str), "acc": task(solution_str)}
"""
TOOLS = """
import asyncio

from hone.agents.messages import ToolCall
from hone.agents.tool_agent import ToolAgent
from hone.agents.tools import tool

calls = 0

@tool
async def count(number: int) -> str:
    \"\"\"Count.

    Args:
        number: how far.
    \"\"\"
    global calls
    calls += 1
    await asyncio.sleep(3 if calls > 96 else 0)
    return str(number)

class Counts(ToolAgent):
    async def play(self, episode):
        async with self.context.toolbox.session(episode, self.context.tokenizer) as tools:
            await self.take_turn(episode, tools.schemas)
            call = ToolCall("call_0", "count", {"number": 7}, "", None)
            episode.log.messages[-1]["tool_calls"] = [call.as_openai()]
            self.answer(episode, await tools.answer([call]), tools.schemas)
            await self.take_turn(episode, tools.schemas)
"""
MULTI_TURN = f"{ROLLOUT}.multi_turn"
SETTING = re.compile(r"(?:^|[ ,])((?:[a-z_]+\.)+[a-z_]+=[^\s,;]+)")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_tiny_runs(tmp_path_factory.mktemp("tiny"), rewards=REWARDS, counting=TOOLS)
    rows = [json.loads(line) for line in (root / "prompts.jsonl").read_text().splitlines()]
    for name, column in (("counts", {"agent_name": "counting:Counts"}), ("held_out", {"data_source": "held_out"})):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row | column) + "\n" for row in rows))
    return root


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
    "entropy_collapse": (60, (reward("noise"), f"{ACTOR}.optim.lr=1e-1")),
    "engine_mismatch": (5, (f"{ROLLOUT}.dtype=bfloat16", f"{ROLLOUT}.temperature=0.1")),
    "critic_lag": (40, (reward("noise"), "algorithm.adv_estimator=gae", "critic.optim.lr=3.0")),
    "flat_reward": (24, (reward("rare"), f"{ROLLOUT}.n=2", f"{ACTOR}.optim.lr=1e-6")),
    "zero_reward": (5, (reward("late"), "preflight.reward_rows=0")),
    "response_length": (14, (reward("noise"), "data.max_response_length=2")),
    "reference_kl": (40, (
        reward("loud_late"), "reward.num_workers=1", "reward.doctor.enable=false", f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.ppo_mini_batch_size=4", "algorithm.norm_adv_by_std_in_grpo=false",
    )),
    "memory_growth": (50, (reward("leaks"),)),
    "slow_steps": (30, (reward("slow_late"), "reward.num_workers=1", "reward.doctor.enable=false")),
    "tool_calls": (14, (
        "data.train_files={tiny}/counts.jsonl", "data.max_prompt_length=400", "data.max_response_length=64", f"{MULTI_TURN}.enable=true",
        f"{MULTI_TURN}.function_tool_path={{tiny}}/counting.py", f"{MULTI_TURN}.max_assistant_turns=2",
        f"{MULTI_TURN}.max_tokens_per_turn=4", f"{MULTI_TURN}.tool_timeout=2", f"{MULTI_TURN}.tool_retries=0",
    )),
}  # fmt: skip
"""Steps and settings of each fault."""


@pytest.mark.parametrize("detector", PLANTED)
def test_a_run_recovers_by_the_advice_of_its_alert(tiny: Path, tmp_path: Path, detector: str) -> None:
    steps, fault = PLANTED[detector]
    words = [
        f"custom_reward_function.path={tiny}/rewards.py",
        reward("noise"),
        f"trainer.total_training_steps={steps}",
        *(word.format(tiny=tiny) for word in fault),
    ]
    followed: list[str] = []
    for turn in range(8):
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


def test_bounded_terms_end_a_hacked_reward(tiny: Path, tmp_path: Path) -> None:
    """The advice is a change of the reward: its terms, each with a bound."""
    scorers = {
        "hacked": (f"custom_reward_function.path={tiny}/rewards.py", reward("hacked")),
        "bounded": (
            f"reward.terms=[{{name: task, function: '{tiny}/rewards.py:task'}}, "
            f"{{name: vowels, function: '{tiny}/rewards.py:vowels', clip: [0, 0.1]}}]",
        ),
    }
    fired, held_out = {}, {}
    for name, words in scorers.items():
        run = tmp_path / name
        given = rl_words(
            tiny, run, f"{ACTOR}.optim.lr=3e-3", f"data.val_files={tiny}/held_out.jsonl", "trainer.test_freq=5"
        )
        given = [word for word in given if not word.startswith("custom_reward_function.")]
        ended = hone(*given, "trainer.total_training_steps=40", *words, log=run.with_suffix(".log"), cwd=tiny)
        assert ended.code == 0, ended.output
        fired[name] = [alert for alert in read_alerts(run) if alert["detector"] == "reward_hacking"]
        rows = read_metrics(run)
        key = next(key for key in rows[-1] if key.startswith("val-core/held_out/") and "/mean@" in key)
        held_out[name] = [row[key] for row in rows if key in row]
    assert "reward.terms" in fired["hacked"][0]["fix"]
    assert held_out["hacked"][-1] < held_out["hacked"][0]
    assert not fired["bounded"]
    assert held_out["bounded"][-1] > held_out["hacked"][-1]  # it may have learned all of it before the first look
