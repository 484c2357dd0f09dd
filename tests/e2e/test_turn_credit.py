"""Runs with credit by turn: turns of played episodes are forked, and a critic of turns is trained."""

import json
from pathlib import Path

import pytest
from support.launch import hone
from support.tiny_runs import rl_words

pytestmark = pytest.mark.application(
    "hone/trainers/algorithm.py",
    "hone/apps/lab/forks.py",
    "hone/agents/forking.py",
)

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
AGENT = (
    f"{MULTI_TURN}.enable=true",
    f"{MULTI_TURN}.max_tokens_per_turn=8",
    f"{MULTI_TURN}.max_assistant_turns=2",
    f"{MULTI_TURN}.tool_config_path=tools.yaml",
    "data.max_prompt_length=400",
    "data.max_response_length=80",
)


def metrics(tiny: Path, run: Path, estimator: str, *words: str) -> list[dict]:
    chosen = f"algorithm.adv_estimator={estimator}"
    ended = hone(*rl_words(tiny, run, *AGENT, chosen, *words, rows="calls"), log=run.with_suffix(".log"), cwd=tiny)
    assert ended.code == 0, ended.output
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_turns_are_valued_by_forks(tiny: Path, tmp_path: Path) -> None:
    words = ("algorithm.forks.samples=2", "algorithm.forks.max_turns=5", "algorithm.forks.min_entropy=0.01")
    steps = metrics(tiny, tmp_path / "run", "turn_value_by_forks", *words)
    assert [(step["forks/turns"], step["forks/no_verdict_rate"]) for step in steps] == [(5, 0), (5, 0)]
    assert all(step["forks/continued_tokens"] > 10 and step["actor/grad_norm"] > 0 for step in steps)
    without = metrics(tiny, tmp_path / "without", "turn_value_by_forks", "algorithm.forks.max_turns=0")
    plain = metrics(tiny, tmp_path / "plain", "rloo", "actor_rollout_ref.actor.recompute_old_log_probs=true")
    assert without[0]["forks/turns"] == 0
    assert without[0]["actor/grad_norm"] == pytest.approx(plain[0]["actor/grad_norm"], rel=1e-4), (
        "without forks it is rloo"
    )
    assert steps[0]["actor/grad_norm"] != pytest.approx(plain[0]["actor/grad_norm"], rel=1e-3)


def test_a_critic_of_turns_learns(tiny: Path, tmp_path: Path) -> None:
    steps = metrics(tiny, tmp_path / "run", "turn_gae")
    assert all(step["critic/vf_loss"] > 0 and step["actor/grad_norm"] > 0 for step in steps)
