"""Rules about keys, files and the device: code, numbers and fix of each finding."""

from __future__ import annotations

import gc
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import check_message
from support.preflight import SMALL_MODEL, change, write_rows

from hone.config import RLConfig, SFTConfig
from hone.config.keys import ConfigProblems
from hone.errors import ConfigError, HoneError
from hone.extras import install_command
from hone.preflight import RULES, batch_plan, check, examine, findings, training_rows
from hone.preflight.rules import Finding
from hone.preflight.training import nearest_divisor


def only_finding(config: RLConfig | SFTConfig) -> Finding:
    finding = list(findings(config))
    assert len(finding) == 1, [f.error.render() for f in finding]
    return finding[0]


def test_a_valid_configuration_has_no_findings(rl: RLConfig, sft: SFTConfig) -> None:
    assert list(findings(rl)) == [] and list(findings(sft)) == []
    check(rl)
    check(sft)


ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"


def validate(rl: RLConfig) -> None:
    """Give the run a validation row that is not in its training data."""
    row = {"prompt": "What is 8 + 9?", "data_source": "exact", "reward_model": {"ground_truth": "17"}}
    rl.data.val_files = str(write_rows(Path(str(rl.data.train_files)).with_name("val.jsonl"), [row]))


@pytest.mark.parametrize(
    ("changes", "code", "stops", "words"),
    [
        (
            {f"{ACTOR}.ppo_mini_batch_size": 16},
            "R13",
            True,
            ["=16", "train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=8"],
        ),
        ({f"{ACTOR}.ppo_mini_batch_size": 3}, "R14", True, ["=3", "=8", "2 prompts", f"{ACTOR}.ppo_mini_batch_size=4"]),
        (
            {"algorithm.adv_estimator": "gae", "critic.ppo_mini_batch_size": 5},
            "R14",
            True,
            ["=5", "critic.ppo_mini_batch_size=4"],
        ),
        ({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 33}, "R15", False, ["=33", "8 prompts x 4 = 32"]),
        ({f"{ACTOR}.clip_ratio_high": 0.28}, "R17", False, ["1 update", "ppo_mini_batch_size=2"]),
        ({f"{ACTOR}.clip_ratio": 0.3}, "R17", False, ["1 update", "ppo_mini_batch_size=2"]),
        ({f"{ACTOR}.ppo_epochs": 17}, "R18", False, ["17 updates"]),
        ({f"{ROLLOUT}.n": 1}, "R19", True, ["adv_estimator=grpo", "rollout.n=1", "rollout.n=8"]),
        ({"algorithm.adv_estimator": "gae", "critic.enable": False}, "R21", True, ["gae", "critic.enable=true"]),
        ({"critic.enable": True}, "R21", False, ["grpo", "critic.enable=null"]),
        (
            {"algorithm.use_kl_in_reward": True, f"{ACTOR}.use_kl_loss": True, "algorithm.kl_ctrl.kl_coef": 0.02},
            "R22",
            False,
            ["0.02", "0.001", "use_kl_in_reward=false"],
        ),
        (
            {f"{ACTOR}.kl_loss_coef": 0.01},
            "R23",
            True,
            ["kl_loss_coef=0.01", "use_kl_loss=true", "kl_loss_coef=0.001"],
        ),
        ({"algorithm.kl_ctrl.kl_coef": 0.01}, "R23", True, ["kl_coef=0.01", "use_kl_in_reward=true"]),
        ({"algorithm.kl_ctrl.target_kl": 0.5}, "R23", False, ["target_kl=0.5", "type=adaptive"]),
        ({"algorithm.lam": 0.95}, "R23", False, ["lam=0.95", "adv_estimator=grpo", "algorithm.lam=1"]),
        (
            {"algorithm.adv_estimator": "gae", "algorithm.norm_adv_by_std_in_grpo": False},
            "R23",
            False,
            ["norm_adv_by_std_in_grpo=false", "gae"],
        ),
        ({f"{ACTOR}.loss_scale_factor": 10.0}, "R23", False, ["token-mean", "seq-mean-token-sum-norm"]),
        ({"critic.optim.lr": 3e-4}, "R23", False, ["lr=0.0003", "critic.enable=true"]),
        ({"trainer.critic_warmup": 5}, "R23", False, ["critic_warmup=5"]),
        ({"reward.custom_reward_function.name": "f"}, "R23", True, ["name=f", "path=FILE.py"]),
        ({f"{MODEL}.lora_alpha": 64}, "R23", False, ["lora_alpha=64", "lora_rank=32"]),
        ({f"{ACTOR}.optim.min_lr_ratio": 0.1}, "R23", False, ["min_lr_ratio=0.1", "cosine"]),
        (
            {f"{ACTOR}.optim.lr_warmup_steps": 3, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.2},
            "R23",
            False,
            ["lr_warmup_steps=3"],
        ),
        ({"trainer.resume_from_path": "x"}, "R23", True, ["resume_mode=auto", "resume_mode=resume_path"]),
        (
            {f"{ACTOR}.ppo_max_token_len_per_gpu": 1000},
            "R29",
            True,
            ["=1000", "512", "ppo_max_token_len_per_gpu=2048", "at least 1024"],
        ),
        ({f"{ROLLOUT}.max_cache_tokens": 1023}, "R29", True, ["max_cache_tokens=1023", "= 1024"]),
        ({"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 9}, "R29", True, ["=9 tokens"]),
        (
            {"algorithm.adv_estimator": "gae", "critic.ppo_max_token_len_per_gpu": 9},
            "R29",
            True,
            ["critic.ppo_max_token_len_per_gpu"],
        ),
        ({f"{ROLLOUT}.temperature": 0.0}, "R32", True, ["4 identical", "temperature=1.0"]),
        ({f"{ROLLOUT}.val_kwargs.n": 3}, "R32", True, ["3 answers", "val_kwargs.temperature=1.0"]),
        (
            {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.top_k": 20, f"{ROLLOUT}.keep_support": False},
            "R32",
            False,
            ["top_k=20, top_p=0.9", "top_k=-1", "top_p=1", "keep_support=false"],
        ),
        (
            {f"{ROLLOUT}.min_p": 0.1, f"{ROLLOUT}.keep_support": True, f"{ROLLOUT}.repetition_penalty": 1.1},
            "R32",
            True,
            ["min_p=0.1", "repetition_penalty=1.1"],
        ),
        ({"data.max_response_length": 1600}, "R30", True, ["2112", "2048"]),
        ({"algorithm.adv_estimator": "grop"}, "R11", True, ["'grop'", "grpo"]),
        (
            {"algorithm.kl_penalty": "k4", "algorithm.use_kl_in_reward": True, "algorithm.adv_estimator": "gae"},
            "R11",
            True,
            ["'k4'", "k3"],
        ),
        ({f"{ACTOR}.kl_loss_type": "low_var", f"{ACTOR}.use_kl_loss": True}, "R11", True, ["low_var_kl"]),
        ({f"{ACTOR}.policy_loss.loss_mode": "vanila"}, "R11", True, ["vanilla"]),
        ({f"{ROLLOUT}.name": "nativ"}, "R11", True, ["native"]),
        ({"reward.scorer": "gsm"}, "R11", True, ["gsm8k"]),
        ({"trainer.logger": ["console", "wndb"]}, "R56", True, ["'wndb'", "wandb"]),
        ({"trainer.save_freq": 0}, "R56", False, ["save_freq=0", "save_freq=-1"]),
        (
            {"trainer.total_training_steps": 20, f"{ACTOR}.optim.lr_warmup_steps": 20},
            "R56",
            True,
            ["20 steps", "lr_warmup_steps=2"],
        ),
        ({"trainer.resume_mode": "resume_path"}, "R55", True, ["resume_from_path", "auto"]),
        (
            {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": "/no/where"},
            "R55",
            True,
            ["'/no/where'"],
        ),
        ({"trainer.default_local_dir": "/dev/null/run"}, "R55", True, ["/dev/null", "default_local_dir=DIR"]),
        ({"data.train_files": None}, "R42", True, ["data.train_files=PATH"]),
        ({"data.train_files": "/no/where.parquet"}, "R42", True, ["/no/where.parquet"]),
        ({"data.val_files": ["/no/where.jsonl"]}, "R42", True, ["/no/where.jsonl"]),
        ({"data.prompt_key": "question"}, "R42", True, ["question", "prompt"]),
        ({f"{MODEL}.path": None}, "R08", True, [f"{MODEL}.path=DIR"]),
        (
            {f"{MODEL}.path": "Qwen/Qwen3-0.6B"},
            "R08",
            True,
            ["'Qwen/Qwen3-0.6B'", f"{MODEL}.path=DIR"],
        ),
        ({f"{MODEL}.tokenizer_path": "/no/where"}, "R08", True, ["/no/where", "tokenizer_path"]),
        ({f"{MODEL}.lora_adapter_path": "/no/where", f"{ACTOR}.optim.lr": 1e-5}, "R08", True, ["adapter_config.json"]),
        (
            {"algorithm.adv_estimator": "gae", "critic.model.path": "/no/where"},
            "R08",
            True,
            ["critic.model.path", "/no/where"],
        ),
        ({f"{MODEL}.custom_chat_template": "nowhere.jinja"}, "R39", True, ["nowhere.jinja", "chatml"]),
    ],
)
def test_rl_rules(rl: RLConfig, changes: dict[str, Any], code: str, stops: bool, words: list[str]) -> None:
    if any("val_kwargs" in key for key in changes):
        validate(rl)
    change(rl, changes)
    finding = only_finding(rl)
    assert (finding.error.code, finding.stops) == (code, stops)
    assert finding.error.fix
    for word in words:
        assert word in finding.error.render()


@pytest.mark.parametrize(
    "changes",
    [
        {"algorithm.adv_estimator": "gae", f"{ROLLOUT}.n": 1, "algorithm.lam": 0.95, "critic.optim.lr": 1e-4},
        {"algorithm.adv_estimator": "gae", "critic.enable": True, "trainer.critic_warmup": 2},
        {
            "critic.ppo_mini_batch_size": 5,
            "critic.enable": None,
            "algorithm.adv_estimator": "gae",
            "data.train_batch_size": 5,
            f"{ACTOR}.ppo_mini_batch_size": 5,
        },
        {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": 0.01, f"{ACTOR}.kl_loss_type": "k2"},
        {
            "algorithm.adv_estimator": "gae",
            "algorithm.use_kl_in_reward": True,
            "algorithm.kl_ctrl.type": "adaptive",
            "algorithm.kl_ctrl.target_kl": 0.5,
        },
        {f"{ACTOR}.clip_ratio_high": 0.28, f"{ACTOR}.ppo_mini_batch_size": 4},
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 32},
        {f"{ACTOR}.ppo_epochs": 16},
        {f"{ACTOR}.ppo_max_token_len_per_gpu": 2048, f"{ROLLOUT}.max_cache_tokens": 1024},
        {"data.max_response_length": 1536},
        {f"{ROLLOUT}.val_kwargs.n": 3, f"{ROLLOUT}.val_kwargs.temperature": 0.6},
        {f"{MODEL}.lora_rank": 8, f"{MODEL}.lora_alpha": 64, f"{ACTOR}.optim.lr": 1e-5},
        {f"{MODEL}.custom_chat_template": "{{ messages }}"},
        {"algorithm.norm_adv_by_std_in_grpo": False},
        {"trainer.total_training_steps": 20, f"{ACTOR}.optim.lr_warmup_steps": 19},
    ],
)
def test_rl_rules_have_no_findings(rl: RLConfig, changes: dict[str, Any]) -> None:
    if any("val_kwargs" in key for key in changes):
        validate(rl)
    change(rl, changes)
    assert [finding.error.render() for finding in findings(rl)] == []


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        (
            {"data.max_token_len_per_gpu": 1000},
            "R29",
            ["=1000", "data.max_length=1024", "data.max_token_len_per_gpu=1024"],
        ),
        ({"data.max_length": 4096}, "R30", ["4096", "2048"]),
        ({"data.messages_key": "chat"}, "R42", ["chat", "messages"]),
        ({"model.path": None}, "R08", ["model.path=DIR"]),
        ({"optim.min_lr_ratio": 0.5}, "R23", ["optim.min_lr_ratio"]),
        ({"trainer.logger": ["tensorbord"]}, "R56", ["tensorboard"]),
    ],
)
def test_sft_rules(sft: SFTConfig, changes: dict[str, Any], code: str, words: list[str]) -> None:
    change(sft, changes)
    finding = only_finding(sft)
    assert finding.error.code == code
    for word in words:
        assert word in finding.error.render()


# ------------------------------------------------------------------------------------------------- model directories


@pytest.mark.parametrize(
    ("missing", "code", "word"),
    [
        ("config.json", "R08", "config.json"),
        ("model.safetensors", "R08", "model.safetensors"),
        ("tokenizer.json", "R08", "tokenizer.json"),
        ("chat_template.jinja", "R39", "chat_template.jinja"),
    ],
)
def test_incomplete_model_directory(rl: RLConfig, model: Path, missing: str, code: str, word: str) -> None:
    (model / missing).unlink()
    finding = only_finding(rl)
    assert finding.error.code == code and word in finding.error.render() and str(model) in finding.error.render()


def test_model_directory_that_is_an_adapter(rl: RLConfig, model: Path) -> None:
    (model / "config.json").rename(model / "adapter_config.json")
    assert f"lora_adapter_path={model}" in only_finding(rl).error.fix


def test_damaged_config_and_missing_shards(rl: RLConfig, model: Path) -> None:
    (model / "model.safetensors").unlink()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (model / "model-1.safetensors").write_bytes(b"")
    assert "1 of 2 weight files: model-2.safetensors" in only_finding(rl).error.render()
    (model / "model-2.safetensors").write_bytes(b"")
    assert list(findings(rl)) == []
    (model / "config.json").write_text("{")
    assert "config.json" in only_finding(rl).error.what


def test_template_is_not_needed_for_text_and_token_ids(rl: RLConfig, model: Path, data: Path) -> None:
    (model / "chat_template.jinja").unlink()
    rl.data.train_batch_size = rl.actor_rollout_ref.actor.ppo_mini_batch_size = 1
    for prompt in ("1 + 1 =", [5, 6, 7]):
        write_rows(data, [{"prompt": prompt, "data_source": "exact", "reward_model": {"ground_truth": "2"}}])
        assert list(findings(rl)) == []


def test_positions_follow_override_config_and_text_config(rl: RLConfig, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({"text_config": {**SMALL_MODEL, "max_position_embeddings": 100}}))
    assert only_finding(rl).error.code == "R30"
    rl.actor_rollout_ref.model.override_config = {"max_position_embeddings": 1024}
    assert list(findings(rl)) == []


# ------------------------------------------------------------------------------------------------------------ machine


def test_cuda_without_a_gpu(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rl.trainer.device = "cuda"
    finding = only_finding(rl)
    assert finding.error.code == "R02" and "trainer.device=cpu" in finding.error.fix


@pytest.mark.parametrize(
    ("supported", "device", "speaks"), [(False, "auto", True), (True, "auto", False), (False, "cpu", False)]
)
def test_bfloat16_on_a_gpu(
    rl: RLConfig, monkeypatch: pytest.MonkeyPatch, supported: bool, device: str, speaks: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla P40")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    rl.actor_rollout_ref.actor.dtype, rl.trainer.device = "bfloat16", device
    finding = list(findings(rl))
    assert [f.error.code for f in finding] == ["R07"] * speaks
    if speaks:
        assert "Tesla P40" in finding[0].error.what and "actor_rollout_ref.actor.dtype=float32" in finding[0].error.fix


def test_tracker_without_its_package(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    rl.trainer.logger = ["console", "wandb"]
    assert install_command("wandb") in only_finding(rl).error.fix


# ---------------------------------------------------------------------------------------------------------- together


def test_errors_come_together_and_warnings_are_logged(rl: RLConfig, caplog: pytest.LogCaptureFixture) -> None:
    change(rl, {f"{ROLLOUT}.n": 1, f"{ACTOR}.ppo_mini_batch_size": 3, "trainer.save_freq": 0})
    with caplog.at_level(logging.WARNING, logger="hone.preflight"), pytest.raises(ConfigProblems) as caught:
        check(rl)
    assert sorted(problem.code for problem in caught.value.problems) == ["R14", "R19"]
    assert "R56" not in str(caught.value)
    assert any("trainer.save_freq=0" in record.getMessage() for record in caplog.records)


def test_a_single_error_is_raised_as_it_is(rl: RLConfig, sft: SFTConfig) -> None:
    rl.actor_rollout_ref.rollout.n = 1
    with pytest.raises(ConfigError) as caught:
        check(rl)
    assert caught.value.code == "R19" and not isinstance(caught.value, ConfigProblems)
    sft.data.train_files = "/no/where.jsonl"
    with pytest.raises(HoneError, match="R42"):
        check(sft)


def test_every_rule_has_a_code_and_a_docstring() -> None:
    assert len(RULES) >= 20
    for entry in RULES:
        assert entry.code[0] == "R" and entry.code[1:].isdigit() and entry.trees
        assert entry.check.__doc__


# -------------------------------------------------------------------------------------------------------------- plan


def test_batch_plan(rl: RLConfig, sft: SFTConfig) -> None:
    change(rl, {"data.train_batch_size": 256, f"{ACTOR}.ppo_mini_batch_size": 64, f"{ACTOR}.ppo_epochs": 2})
    rl.trainer.total_epochs = 3
    assert batch_plan(rl, rows=7500, on_cpu=False) == (
        "plan: 256 prompts x 4 = 1024 sequences a step; "
        "4 mini-batches of 64 prompts (256 sequences) x 2 epochs -> 8 optimizer updates a step; "
        "micro-batches of up to 16384 tokens; 7500 rows -> 29 steps an epoch, 87 in all (3 passes over the data)"
    )
    assert "10 rows -> 5 updates an epoch, 5 in all (1 passes" in batch_plan(sft, rows=10, on_cpu=True)
    assert "micro-batches of up to 4608 tokens" in batch_plan(rl, rows=7500, on_cpu=True), "a CPU takes fewer at once"
    assert training_rows(rl) == 10 and training_rows(sft) == 10
    rl.data.train_max_samples = 3
    assert training_rows(rl) == 3


@given(number=st.integers(1, 500), wanted=st.integers(1, 600))
def test_nearest_divisor(number: int, wanted: int) -> None:
    best = nearest_divisor(number, wanted)
    assert number % best == 0
    assert all(abs(d - wanted) >= abs(best - wanted) for d in range(1, number + 1) if number % d == 0)


def test_tokenizer_and_rows_are_read_once(rl: RLConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from hone.data import custom, files, tokenizer

    loaded: list[str] = []
    read, load = files.read_rows, tokenizer.load_tokenizer
    monkeypatch.setattr(tokenizer, "load_tokenizer", lambda *a, **k: loaded.append("tokenizer") or load(*a, **k))
    monkeypatch.setattr(
        custom,
        "read_rows",
        lambda *a, **k: loaded.append("rows" if k.get("max_rows") == -1 else "first") or read(*a, **k),
    )
    assert examine(rl).findings == []
    assert loaded.count("tokenizer") == 1 and loaded.count("rows") == 1


@pytest.mark.parametrize("on", [True, False])
def test_the_garbage_collector_is_restored(rl: RLConfig, on: bool) -> None:
    (gc.enable if on else gc.disable)()
    try:
        examine(rl)
        assert gc.isenabled() == on
    finally:
        gc.enable()


def test_served_engines_get_no_quantised_directory(rl: RLConfig, model: Path) -> None:
    (model / "config.json").write_text(json.dumps({**SMALL_MODEL, "quantization_config": {"quant_method": "fp8"}}))
    assert "R08" not in [finding.error.code for finding in findings(rl)]
    change(rl, {f"{ROLLOUT}.name": "vllm"})
    (found,) = [finding.error for finding in findings(rl) if finding.error.code == "R08"]
    check_message(found, "fp8", f"hone export {model}", f"{ROLLOUT}.name=native", where=f"{MODEL}.path")


def test_override_config_names_settings_of_the_model(rl: RLConfig, model: Path) -> None:
    key = f"{MODEL}.override_config"
    change(rl, {key: {"rope_theta_": 5.0}})
    (unknown,) = [finding.error for finding in findings(rl) if finding.error.where.startswith(key)]
    check_message(unknown, "rope_theta_", code="R08", where=f"{key}.rope_theta_")
    change(rl, {key: {"attention_dropout": 0.1}})
    assert not [finding for finding in findings(rl) if finding.error.where.startswith(key)]
