"""Eight billion parameters on one GPU, by the plan."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
from support.preflight import change

from hone.config import RLConfig, load_config
from hone.models.registry import CacheSize
from hone.preflight.plan.devices import GIB, device_named
from hone.preflight.plan.fit import TIGHT, Fitter
from hone.preflight.plan.model import ModelShape

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
EIGHT_BILLION = ModelShape(
    "qwen3", 8_190_735_360, 36, 4096, 32, 8, 128, 12288, 151936, tied=False, cache=CacheSize(36 * 2 * 8 * 128)
)


def test_eight_billion_parameters_train_fully_on_one_gpu_of_141_gb() -> None:
    """GRPO with its reference, in bfloat16; the knobs change neither the model nor its engine."""
    config = load_config(RLConfig, [f"{MODEL}.path=x", "data.train_files=y"], preset="grpo")
    fitting = Fitter(device_named("H200-141GB"), EIGHT_BILLION, {}).fit(config)
    settings = " ".join(knob.setting for knob in fitting.knobs)
    assert fitting.fits and "AdamW8bit" in settings and "lora" not in settings and "max_num_seqs" not in settings
    update = next(phase for phase in fitting.fullest.phases if phase.name == "update")
    assert update.size("optimizer") == pytest.approx(2 * EIGHT_BILLION.parameters * (1 + 1 / 64))
    assert update.size("reference") < 0.55 * update.size("weights"), "its matrices are held in bfloat16"


def test_eight_billion_parameters_train_by_lora_on_one_gpu_of_80_gb() -> None:
    words = [f"{MODEL}.path=x", "data.train_files=y", f"{MODEL}.lora_rank=32"]
    fitter = Fitter(device_named("H100-80GB"), EIGHT_BILLION, {})
    config = load_config(RLConfig, words, preset="grpo")
    fitting = fitter.fit(config)
    assert fitting.fits and [knob.setting.partition("=")[0] for knob in fitting.knobs] == [
        f"{ACTOR}.ppo_max_token_len_per_gpu"
    ]
    checkpointed = {
        f"{MODEL}.enable_gradient_checkpointing": True,
        f"{MODEL}.gradient_checkpointing_keeps": "attention",
    }
    assert fitting.faster is None, "without checkpointing nothing is recomputed"
    fitting = fitter.fit(change(config, checkpointed))
    assert fitting.knobs == () and fitting.faster is None, "it fits as it is, and attention is kept already"
    change(config, {f"{ACTOR}.dtype": "float32"})
    assert fitter.peak(config) > fitter.limit, "a base in float32 does not"


def test_keeping_attention_is_offered_where_it_fits() -> None:
    words = [f"{MODEL}.path=x", "data.train_files=y", f"{MODEL}.enable_gradient_checkpointing=true"]
    config = load_config(RLConfig, words, preset="grpo")
    fitter = Fitter(replace(device_named("H200-141GB"), memory=300 * GIB), EIGHT_BILLION, {})
    setting = f"{MODEL}.gradient_checkpointing_keeps"
    assert fitter.fit(config).faster == f"{setting}=attention"
    kept = change(copy.deepcopy(config), {setting: "attention"})
    assert fitter.fit(kept).faster is None and fitter.peak(kept) > fitter.peak(config)
    between = (fitter.peak(config) + fitter.peak(kept)) / 2 / TIGHT
    fitting = Fitter(replace(fitter.device, memory=between), EIGHT_BILLION, {}).fit(config)
    assert fitting.knobs == () and fitting.faster is None, "there is no room for it"
