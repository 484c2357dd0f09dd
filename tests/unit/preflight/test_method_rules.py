"""Rules about methods: requirements, options of other methods, inconsistent corrections, custom methods."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.preflight import change, rows, write_rows

from hone.config import RLConfig, load_config
from hone.config.load import preset_names
from hone.preflight import findings

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


@pytest.mark.parametrize(
    ("changes", "code", "stops", "words"),
    [
        (
            {"algorithm.adv_estimator": "optimal_token_baseline", f"{ACTOR}.calculate_sum_pi_squared": False},
            *("R62", True, ["optimal_token_baseline", "calculate_sum_pi_squared=null"]),
        ),
        (
            {"algorithm.adv_estimator": "optimal_token_baseline", f"{CORRECTION}.bypass_mode": True},
            *("R62", True, ["optimal_token_baseline", "bypass_mode=true", "bypass_mode=false"]),
        ),
        (
            {f"{ACTOR}.calculate_sum_pi_squared": True, f"{CORRECTION}.bypass_mode": True},
            *("R62", True, ["calculate_sum_pi_squared=true", "calculate_sum_pi_squared=null"]),
        ),
        (
            {"algorithm.top_entropy_share": 0.2, f"{CORRECTION}.bypass_mode": True},
            *("R62", True, ["top_entropy_share=null", "bypass_mode=false"]),
        ),
        ({"algorithm.adv_estimator": "gdpo"}, "R62", True, ["gdpo", "gdpo_reward_keys=[acc,format]"]),
        (
            {
                "algorithm.adv_estimator": "gdpo",
                "algorithm.gdpo_reward_keys": ["a", "b"],
                "algorithm.gdpo_reward_weights": [1.0],
            },
            *("R62", True, ["1 weights", "2 reward components (a, b)", "gdpo_reward_weights=[1.0,1.0]"]),
        ),
        (
            {
                "algorithm.adv_estimator": "gdpo",
                "algorithm.gdpo_reward_keys": ["a"],
                "algorithm.use_kl_in_reward": True,
            },
            *("R62", True, ["use_kl_in_reward=true", "use_kl_loss=true"]),
        ),
        (
            {"trainer.save_microbatch_steps": [0, 3, 9], "trainer.total_training_steps": 4},
            *("R78", True, ["[0, 9]", "1 to 4", "save_microbatch_steps=[3]"]),
        ),
        (
            {"trainer.profile_steps": [0, 3, 9], "trainer.total_training_steps": 4},
            *("R83", False, ["[0, 9]", "1 to 4", "profile_steps=[3]"]),
        ),
        ({"algorithm.adv_kwargs": {"epsilom": 0.1}}, "R62", True, ["'epsilom'", "epsilon"]),
        (
            {f"{ACTOR}.policy_loss.loss_kwargs": {"clip_ratio_hi": 0.1}},
            "R62",
            True,
            ["'clip_ratio_hi'", "clip_ratio_high"],
        ),
        (
            {"algorithm.adv_estimator": "remax", "algorithm.adv_kwargs": {"x": 1}},
            "R62",
            True,
            ["'remax'", "algorithm.adv_kwargs={}"],
        ),
        (
            {
                "algorithm.adv_estimator": "remax",
                f"{ROLLOUT}.n": 1,
                "algorithm.filter_groups.enable": True,
            },
            *("R19", True, ["rollout.n=1", "filter_groups.enable=false"]),
        ),
        ({"algorithm.adv_estimator": "grpo_passk", f"{ROLLOUT}.n": 1}, "R19", True, ["grpo_passk", "rollout.n=8"]),
        ({"algorithm.filter_groups.metric": "acc"}, "R23", True, ["metric=acc", "filter_groups.enable=true"]),
        ({"algorithm.pf_ppo.weight_pow": 3.0}, "R23", True, ["weight_pow=3", "use_pf_ppo=true"]),
        (
            {
                "algorithm.use_pf_ppo": True,
                "algorithm.pf_ppo.reweight_method": "max_min",
                "algorithm.pf_ppo.weight_pow": 3.0,
            },
            *("R23", False, ["reweight_method=max_min", "reweight_method=pow"]),
        ),
        ({"trainer.async_training.order": "ready_first"}, "R23", False, ["order=ready_first", "max_staleness=1"]),
        (
            {"trainer.async_training.validation_share": 0.25},
            *("R23", False, ["validation_share=0.25", "max_staleness=1"]),
        ),
        ({"trainer.async_training.partial_rollouts": True}, "R23", False, ["partial_rollouts=true", "max_staleness=1"]),
        (
            {"trainer.async_training.interrupted_cache": "keep"},
            *("R23", False, ["interrupted_cache=keep", "partial_rollouts=true"]),
        ),
        (
            {
                "trainer.async_training.max_staleness": 2,
                f"{ROLLOUT}.name": "hf",
                f"{CORRECTION}.preset": "decoupled_token_is",
            },
            *("R65", True, ["max_staleness=2", "'hf'", "name=native"]),
        ),
        (
            {"trainer.async_training.stream": True, "algorithm.adv_estimator": "remax", f"{ROLLOUT}.num_replicas": 1},
            *("R68", True, ["remax", "greedy"]),
        ),
        ({"reward.overlong_buffer.len": 5}, "R23", True, ["len=5", "overlong_buffer.enable=true"]),
        ({f"{ACTOR}.tau_pos": 2.0}, "R23", False, ["tau_pos=2", "loss_mode=vanilla"]),
        ({f"{ACTOR}.policy_loss.kl_cov_ratio": 0.1}, "R23", False, ["kl_cov_ratio=0.1", "vanilla"]),
        (
            {f"{ACTOR}.policy_loss.loss_mode": "gpg", f"{ACTOR}.clip_ratio": 0.3},
            *("R23", False, ["clip_ratio=0.3", "loss_mode=gpg"]),
        ),
        (
            {
                f"{ACTOR}.clip_ratio": 0.3,
                f"{ACTOR}.clip_ratio_low": 0.1,
                f"{ACTOR}.clip_ratio_high": 0.1,
                f"{ACTOR}.ppo_mini_batch_size": 4,
            },
            *("R23", False, ["clip_ratio=0.3", "clip_ratio_low", "clip_ratio_high"]),
        ),
        ({"algorithm.gdpo_reward_keys": ["acc"]}, "R23", False, ["gdpo_reward_keys=[acc]", "adv_estimator=grpo"]),
        ({f"{CORRECTION}.rollout_is_threshold": "3.0"}, "R23", True, ["rollout_is=null", "rollout_is=token"]),
        ({f"{CORRECTION}.preset": "decoupled_tokens"}, "R26", True, ["decoupled_token"]),
        ({f"{CORRECTION}.loss_type": "reinforce"}, "R26", True, ["loss_type=reinforce", "bypass_mode=true"]),
        ({f"{CORRECTION}.rollout_rs": "seq_mean_k1"}, "R26", True, ["rollout_rs=seq_mean_k1"]),
        (
            {f"{CORRECTION}.bypass_mode": True, f"{CORRECTION}.rollout_is": "token"},
            *("R26", True, ["loss_type=reinforce"]),
        ),
        (
            {f"{CORRECTION}.preset": "bypass_pg_is", f"{ACTOR}.policy_loss.loss_mode": "gspo"},
            *("R26", True, ["loss_mode=vanilla", "loss_mode=gspo"]),
        ),
        ({f"{ACTOR}.policy_loss.loss_mode": "bypass_mode"}, "R26", True, ["bypass_mode=false", "loss_mode=vanilla"]),
        (
            {"reward.overlong_buffer.enable": True, "data.max_response_length": 100},
            *("R29", True, ["len=128 tokens > data.max_response_length=100", "overlong_buffer.len=20"]),
        ),
        (
            {"algorithm.adv_estimator": "nowhere_at_all:f"},
            "R11",
            True,
            ["nowhere_at_all", "algorithm.adv_estimator"],
        ),
        ({f"{ACTOR}.policy_loss.loss_mode": "json:dump_"}, "R11", True, ["'dump_'", "dump"]),
        ({"algorithm.adv_estimator": "json:decoder"}, "R11", True, ["'json:decoder'"]),
        ({"reward.terms": [{"scorer": "gsm8"}]}, "R11", True, ["'gsm8'", "gsm8k"]),
        ({"reward.terms": [{"scorer": "exact", "wait": 1}]}, "R11", True, ["'wait'", "weight", "terms[0]"]),
    ],
)
def test_method_rules(rl: RLConfig, changes: dict[str, Any], code: str, stops: bool, words: list[str]) -> None:
    finding = list(findings(change(rl, changes)))
    assert [(f.error.code, f.stops) for f in finding] == [(code, stops)], [f.error.render() for f in finding]
    assert finding[0].error.fix or code == "R11"
    for word in words:
        assert word in finding[0].error.render()


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.adv_estimator": "optimal_token_baseline"},
        {f"{ACTOR}.calculate_sum_pi_squared": True},
        {
            "algorithm.adv_estimator": "gdpo",
            "algorithm.gdpo_reward_keys": ["a"],
            "algorithm.gdpo_reward_weights": [2.0],
        },
        {"algorithm.adv_estimator": "remax", f"{ROLLOUT}.n": 1},
        {"algorithm.adv_kwargs": {"epsilon": 0.1}},
        {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"},
        {"algorithm.use_pf_ppo": True, "algorithm.pf_ppo.weight_pow": 3.0},
        {f"{ACTOR}.policy_loss.loss_mode": "sapo", f"{ACTOR}.tau_pos": 2.0},
        {f"{ACTOR}.policy_loss.loss_mode": "m2po", f"{ACTOR}.policy_loss.m2_threshold": 0.1},
        {f"{CORRECTION}.preset": "decoupled_token_is", f"{CORRECTION}.rollout_is_threshold": "3.0"},
        {f"{CORRECTION}.preset": "bypass_pg_is", f"{ACTOR}.clip_ratio_c": 4.0},
        {f"{CORRECTION}.bypass_mode": True, f"{ACTOR}.policy_loss.loss_mode": "gspo"},
    ],
)
def test_method_rules_have_no_findings(rl: RLConfig, changes: dict[str, Any]) -> None:
    assert [finding.error.render() for finding in findings(change(rl, changes))] == []


@pytest.mark.parametrize("preset", preset_names("rl"))
def test_presets_have_no_findings(preset: str, model: Path, data: Path, tmp_path: Path) -> None:
    """The preset keeps its batch sizes; the data has enough rows."""
    write_rows(data, rows(300))
    overrides = [
        f"data.train_files={data}",
        f"actor_rollout_ref.model.path={model}",
        f"trainer.default_local_dir={tmp_path}/run",
        "trainer.device=cpu",
    ]
    if preset == "opd":
        overrides.append("distillation.teacher_prompt='{prompt} {ground_truth}'")
    if preset.startswith("agent_"):
        (tmp_path / "tools.yaml").write_text("tools: [{name: calculator}]")
        overrides += ["data.max_prompt_length=320", "data.max_response_length=640"]  # the model has 2048 positions
        overrides.append("actor_rollout_ref.rollout.multi_turn.renderer=text_tools")
        overrides.append(f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path}/tools.yaml")
    config = load_config(RLConfig, overrides, preset=preset)
    assert [finding.error.render() for finding in findings(config)] == []


def test_custom_methods(rl: RLConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = "def mine(token_level_rewards, response_mask, *, values, strength=1.0): ...\n"
    (tmp_path / "custom_methods.py").write_text(source)
    change(rl, {"algorithm.adv_estimator": "custom_methods:mine", "algorithm.adv_kwargs": {"strength": 2.0}})
    assert list(findings(rl)) == []
    rl.critic.enable = False
    (finding,) = findings(rl)
    assert finding.error.code == "R21" and "custom_methods:mine" in finding.error.render()
