"""Truncated sampling that trains right: the trainer's distribution is the one sampled from, in whole runs."""

import json
from pathlib import Path

import pytest
from support import forked_engines
from support.archives import records
from support.launch import hone
from support.tiny_runs import rl_words

pytestmark = pytest.mark.application(
    "hone/algorithms/support.py",
    "hone/generation/native/sampler.py",
    "hone/trainers/algorithm.py",
)

TRUNCATED = ("actor_rollout_ref.rollout.top_p=0.8", "actor_rollout_ref.rollout.top_k=60")
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
CASES = {
    "one turn": ("prompts", ()),
    "two turns around a tool": (
        "calls",
        (
            f"{MULTI_TURN}.enable=true",
            f"{MULTI_TURN}.max_tokens_per_turn=8",
            f"{MULTI_TURN}.max_assistant_turns=2",
            f"{MULTI_TURN}.tool_config_path=tools.yaml",
            "data.max_prompt_length=400",
            "data.max_response_length=80",
        ),
    ),
    "optimal token baseline with an entropy bonus": (
        "prompts",
        (
            "algorithm.adv_estimator=optimal_token_baseline",
            "actor_rollout_ref.rollout.min_p=0.01",
            "actor_rollout_ref.actor.entropy_coeff=0.01",
        ),
    ),
    "asynchronous": ("prompts", ("trainer.async_training.max_staleness=1",)),
}


def trained(tiny: Path, run: Path, *words: str, rows: str = "prompts") -> tuple[list[dict], list[dict]]:
    """Metrics of each step, and the episodes of the first."""
    ended = hone(
        *rl_words(tiny, run, *TRUNCATED, *words, rows=rows),
        log=run.with_suffix(".log"),
        cwd=tiny,
        prepare=forked_engines.install,
    )
    assert ended.code == 0, ended.output
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return steps, records(run, 1)


@pytest.mark.parametrize("case", CASES)
def test_the_trainer_has_the_distribution_sampled_from(tiny: Path, tmp_path: Path, case: str) -> None:
    rows, words = CASES[case]
    steps, _ = trained(tiny, tmp_path / "run", *words, rows=rows)
    assert len(steps) == 2
    for step in steps:
        if step["training/staleness"] == 0:
            assert step["training/rollout_log_probs_diff_max"] < 1e-5
        assert 1 < step["rollout/support_tokens"] <= 60
        assert step["rollout/support_bytes"] >= 4 * step["rollout/support_tokens"] + 4


def test_the_engines_log_probs_are_old_log_probs(tiny: Path, tmp_path: Path) -> None:
    """In bypass mode the first update compares the trainer with the sampler; supports change neither the tokens nor the ratio."""
    words = ("algorithm.rollout_correction.bypass_mode=true", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    steps, episodes = trained(tiny, tmp_path / "run", *words)
    whole_steps, whole = trained(tiny, tmp_path / "whole", *words, "actor_rollout_ref.rollout.keep_support=false")
    assert abs(steps[0]["actor/ppo_kl"]) < 1e-5
    assert [episode["response_ids"] for episode in episodes] == [episode["response_ids"] for episode in whole]
    assert "rollout/support_tokens" not in whole_steps[0]
    assert steps[0]["actor/grad_norm"] != pytest.approx(whole_steps[0]["actor/grad_norm"], rel=1e-3)
