"""Rules about preference training and reward models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.preflight import change

from hone.config import PreferenceConfig, RewardModelConfig, RLConfig
from hone.errors import HoneError
from hone.preflight import batch_plan, check, findings, training_rows

PAIR = {"prompt": "1 + 1 = ?", "chosen": "2", "rejected": "3"}
LABELLED = {"prompt": "1 + 1 = ?", "completion": "2", "label": True}
ONLINE = "actor_rollout_ref.actor.preference_loss"
JUDGE = "reward.reward_model"


def write(folder: Path, row: dict[str, Any], name: str) -> str:
    (folder / name).write_text((json.dumps(row) + "\n") * 6)
    return str(folder / name)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return write(tmp_path, PAIR, "pairs.jsonl")


@pytest.fixture
def labels(tmp_path: Path) -> str:
    return write(tmp_path, LABELLED, "labels.jsonl")


def prepared(config: Any, model: Path, files: str, folder: Path) -> Any:
    config.data.train_files, config.data.train_batch_size, config.model.path = files, 2, str(model)
    config.trainer.default_local_dir, config.trainer.device = str(folder / "run"), "cpu"
    return config


@pytest.fixture
def prefer(model: Path, pairs: str, tmp_path: Path) -> PreferenceConfig:
    """A configuration of `hone prefer` without problems."""
    return prepared(PreferenceConfig(), model, pairs, tmp_path)


@pytest.fixture
def scalar(model: Path, pairs: str, tmp_path: Path) -> RewardModelConfig:
    """A configuration of `hone reward-model` without problems."""
    return prepared(RewardModelConfig(), model, pairs, tmp_path)


@pytest.fixture
def judge(model: Path) -> Path:
    """A directory that looks like a reward model."""
    settings = {"architectures": ["Qwen3ForSequenceClassification"], "max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps(settings))
    return model


def reported(config: Any) -> list[tuple[str, bool, str]]:
    return [(finding.error.code, finding.stops, finding.error.render()) for finding in findings(config)]


def test_valid_configurations_have_no_findings(prefer, scalar, labels, rl: RLConfig, judge: Path) -> None:
    assert reported(prefer) == reported(scalar) == []
    check(prefer)
    assert training_rows(prefer) == 6
    assert batch_plan(prefer, 6, on_cpu=False) == (
        "plan: 2 preferences an optimizer update; micro-batches of up to 16384 tokens; 6 rows -> 3 updates an epoch, 3 in "
        "all (1 passes over the data)"
    )
    change(prefer, {"loss.name": "kto", "data.train_files": labels})
    assert reported(prefer) == [] and training_rows(prefer) == 6
    change(rl, {f"{JUDGE}.enable": True, f"{JUDGE}.path": str(judge), f"{JUDGE}.coef": 2.0})
    assert reported(rl) == []
    change(rl, {f"{ONLINE}.loss_mode": "ipo", f"{ONLINE}.beta": 0.5, f"{ONLINE}.margin": 0.1})
    assert reported(rl) == []


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"loss.name": "dpp"}, "R11", ["'dpp'", "dpo"]),
        ({"loss.simpo_gamma": 0.5}, "R11", ["simpo_gamma=0.5", "loss.name=dpo", "loss.name=simpo"]),
        ({"loss.name": "orpo", "loss.label_smoothing": 0.1}, "R11", ["label_smoothing=0.1", "orpo"]),
        ({"ref.mode": "adapter_off"}, "R24", ["ref.mode=adapter_off", "model.lora_rank=32"]),
        (
            {"ref.mode": "adapter_off", "model.lora_rank": 8, "ref.model_path": "x", "optim.lr": 1e-4},
            "R24",
            ["ref.model_path=x"],
        ),
        ({"loss.name": "kto", "ref.mode": "precompute"}, "R24", ["ref.mode=precompute", "ref.mode=copy"]),
        ({"loss.name": "kto", "data.train_batch_size": 1}, "R24", ["train_batch_size=1"]),
        ({"data.chosen_key": "better"}, "R42", ["'better' and 'rejected'", "hone data pairs"]),
        ({"data.max_token_len_per_gpu": 100}, "R29", ["data.max_length=1024"]),
        ({"data.max_length": 4096}, "R30", ["4096", "2048"]),
        ({"data.train_files": None}, "R42", ["data.train_files"]),
        ({"model.path": "nowhere"}, "R08", ["'nowhere'"]),
        ({"trainer.logger": ["tensorbord"]}, "R56", ["tensorboard"]),
    ],
)
def test_prefer_rules(prefer: PreferenceConfig, changes: dict[str, Any], code: str, words: list[str]) -> None:
    change(prefer, changes)
    ((reported_code, stops, text),) = reported(prefer)
    assert (reported_code, stops) == (code, True) and "Fix:" in text
    for word in words:
        assert word in text


def test_an_unused_reference_is_a_warning(prefer: PreferenceConfig) -> None:
    change(prefer, {"loss.name": "orpo", "ref.mode": "copy"})
    ((code, stops, text),) = reported(prefer)
    assert code == "R24" and not stops and "loss.name=orpo" in text and "ref.mode=auto" in text


def test_labels_where_pairs_are_needed(prefer, scalar, labels: str) -> None:
    for config, word in ((prefer, "loss.name=kto"), (scalar, "chosen and rejected")):
        config.data.train_files = labels
        ((code, stops, text),) = reported(config)
        assert code == "R42" and stops and word in text


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"loss.margin_key": "gap"}, "R42", ["gap"]),
        ({"optim.min_lr_ratio": 0.1}, "R23", ["min_lr_ratio"]),
    ],
)
def test_reward_model_rules(scalar, changes: dict[str, Any], code: str, words: list[str]) -> None:
    change(scalar, changes)
    ((reported_code, _, text),) = reported(scalar)
    assert reported_code == code and all(word in text for word in words)


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({f"{ONLINE}.beta": 0.5}, "R11", ["loss_mode=null", f"{ONLINE}.loss_mode=dpo"]),
        ({f"{ONLINE}.margin": 0.5}, "R11", ["margin=0.5"]),
        ({f"{ONLINE}.loss_mode": "dpp"}, "R11", ["'dpp'"]),
        ({f"{ONLINE}.loss_mode": "kto"}, "R11", ["loss_mode=kto", "loss_mode=dpo"]),
        ({f"{ONLINE}.loss_mode": "dpo", "actor_rollout_ref.actor.entropy_coeff": 0.1}, "R11", ["entropy_coeff=0"]),
        ({f"{ONLINE}.loss_mode": "dpo", "actor_rollout_ref.actor.use_kl_loss": True}, "R11", ["use_kl_loss=false"]),
        (
            {f"{ONLINE}.loss_mode": "dpo", "algorithm.rollout_correction.rollout_is": "token"},
            "R11",
            ["rollout_is=null"],
        ),
        ({f"{JUDGE}.enable": True}, "R08", [f"{JUDGE}.path=DIR"]),
        ({f"{JUDGE}.enable": True, f"{JUDGE}.path": "nowhere"}, "R08", ["'nowhere'"]),
        ({f"{JUDGE}.path": "x"}, "R23", [f"{JUDGE}.enable=true"]),
        ({f"{JUDGE}.coef": 2.0}, "R23", ["coef=2", "reward_model.enable=false", "coef=1 "]),
    ],
)
def test_rl_rules(rl: RLConfig, changes: dict[str, Any], code: str, words: list[str]) -> None:
    change(rl, changes)
    ((reported_code, stops, text),) = reported(rl)
    assert (reported_code, stops) == (code, True) and all(word in text for word in words)


def test_a_reward_model_must_be_one(rl: RLConfig, model: Path, judge: Path) -> None:
    change(rl, {f"{JUDGE}.enable": True, f"{JUDGE}.path": str(judge), "data.max_response_length": 1600})
    texts = [text for _, _, text in reported(rl)]
    assert len(texts) == 2 and any("max_position_embeddings=2048" in text and "= 2112" in text for text in texts)
    change(rl, {"data.max_response_length": 64})
    (judge / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]}))
    ((code, _, text),) = reported(rl)
    assert code == "R08" and "Qwen3ForCausalLM" in text and "hone reward-model" in text


def test_all_problems_are_raised_together(prefer: PreferenceConfig) -> None:
    change(prefer, {"loss.name": "dpp", "data.max_token_len_per_gpu": 100})
    with pytest.raises(HoneError, match="2"):
        check(prefer)
