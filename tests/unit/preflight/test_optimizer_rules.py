"""Rules about optimizers: each model that is trained, each way in which an optimizer cannot be created."""

from __future__ import annotations

from typing import Any

import pytest
from support.preflight import change

from hone.config import RLConfig, SFTConfig
from hone.preflight import findings

ACTOR = "actor_rollout_ref.actor"


def found(config: RLConfig | SFTConfig, code: str) -> list[tuple[str, str]]:
    """Place and text of the findings with a code; all of them stop the run."""
    chosen = [finding for finding in findings(config) if finding.error.code == code]
    assert all(finding.stops for finding in chosen)
    return [(finding.error.where, finding.error.what) for finding in chosen]


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "Muon"},
        {"optimizer": "Muon", "override_optimizer_config": {"ns_steps": 4}, "ema_decay": 0.99},
        {"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}},
        {"param_groups": [{"params": r"layers\.1\.", "lr_mult": 0.5}, {"params": "lm_head"}]},
        {"lr_scheduler_type": "wsd", "lr_wsd_decay_steps": 3, "lr_wsd_decay_style": "linear", "min_lr_ratio": 0.1},
    ],
)
def test_sound_settings_have_no_finding(changes: dict[str, Any], sft: SFTConfig) -> None:
    change(sft, {f"optim.{key}": value for key, value in changes.items()})
    assert list(findings(sft)) == []


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"optimizer": "Moun"}, "optimizer", "'Moun'"),
        ({"optimizer": "LBFGS"}, "optimizer", "LBFGS"),
        ({"override_optimizer_config": {"velocity": 1}}, "optimizer", "velocity"),
        ({"optimizer": "Muon", "override_optimizer_config": {"ns_steps": 0}}, "optimizer", "ns_steps=0"),
        ({"param_groups": [{"params": "layers.7"}]}, "param_groups[0].params", "'layers.7'"),
        ({"ema_decay": 1.0}, "ema_decay", "ema_decay=1"),
    ],
)
@pytest.mark.parametrize("block", [f"{ACTOR}.optim", "critic.optim"])
def test_each_trained_model_is_checked(block: str, changes: dict[str, Any], key: str, words: str, rl: RLConfig) -> None:
    change(rl, {f"{block}.{name}": value for name, value in changes.items()})
    assert found(rl, "R85") == [] or block != "critic.optim"  # without a critic its settings have no effect
    change(rl, {"algorithm.adv_estimator": "gae"})
    ((where, what),) = found(rl, "R85")
    assert where == f"{block}.{key}" and words in what


def test_the_critic_has_a_head_of_its_own(rl: RLConfig) -> None:
    groups = [{"params": "score", "lr_mult": 10}]
    change(rl, {"algorithm.adv_estimator": "gae", "critic.optim.param_groups": groups})
    assert found(rl, "R85") == []
    change(rl, {f"{ACTOR}.optim.param_groups": groups})
    assert [where for where, _ in found(rl, "R85")] == [f"{ACTOR}.optim.param_groups[0].params"]


def test_adapters_have_names_of_their_own(sft: SFTConfig) -> None:
    groups = [{"params": "lora_B", "lr_mult": 16}]  # LoRA+
    change(sft, {"model.lora_rank": 8, "optim.lr": 1e-4, "optim.param_groups": groups})
    assert found(sft, "R85") == []
    change(sft, {"optim.param_groups": [{"params": "embed_tokens"}]})
    assert len(found(sft, "R85")) == 1


def test_eight_bits_with_shards_are_refused_before_the_model_is_divided(rl: RLConfig) -> None:
    pytest.importorskip("torchao")
    change(rl, {f"{ACTOR}.optim.optimizer": "AdamW8bit"})
    assert found(rl, "R85") == []
    change(rl, {"trainer.runtime": "ray", "trainer.n_gpus_per_node": 2})
    assert [where for where, _ in found(rl, "R85")] == [f"{ACTOR}.optim.optimizer"]


def test_the_decay_fits_after_the_warm_up(sft: SFTConfig) -> None:
    settings = {"lr_scheduler_type": "wsd", "lr_warmup_steps": 5, "lr_wsd_decay_steps": 18}
    change(sft, {f"optim.{key}": value for key, value in settings.items()} | {"trainer.total_training_steps": 23})
    assert found(sft, "R56") == []
    change(sft, {"trainer.total_training_steps": 22})
    assert [where for where, _ in found(sft, "R56")] == ["optim.lr_wsd_decay_steps"]


def test_a_warm_up_of_the_critic_fits_into_the_run(rl: RLConfig) -> None:
    change(rl, {"critic.optim.lr_warmup_steps": 5, "trainer.total_training_steps": 5})
    assert found(rl, "R56") == []
    change(rl, {"algorithm.adv_estimator": "gae"})
    assert [where for where, _ in found(rl, "R56")] == ["critic.optim.lr_warmup_steps"]


@pytest.mark.parametrize("key", ["lr_wsd_decay_style", "lr_wsd_decay_steps", "lr_wsd_decay_steps_ratio"])
def test_settings_of_wsd_need_wsd(key: str, sft: SFTConfig) -> None:
    value = {"lr_wsd_decay_style": "linear", "lr_wsd_decay_steps": 3, "lr_wsd_decay_steps_ratio": 0.5}[key]
    change(sft, {f"optim.{key}": value})
    assert [finding.error.where for finding in findings(sft)] == [f"optim.{key}"]
