"""Settings with which a run reads no images; models whose images are not read stay models of text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.messages import raises

from hone.config.offline import RewardModelConfig, SFTConfig
from hone.config.tree import RLConfig
from hone.data.image_processor import load_image_processor, reads_images, refuse_unread
from hone.errors import ModelError
from hone.preflight.rows import image_limits


def rl(**changes: Any) -> RLConfig:
    config = RLConfig()
    config.algorithm.adv_estimator = changes.pop("adv_estimator", "grpo")
    for name, value in changes.items():
        setattr(config.actor_rollout_ref.rollout, name, value)
    return config


def lora(**changes: Any) -> RLConfig:
    config = rl(name="vllm", **changes)
    config.actor_rollout_ref.model.lora_rank = 8
    return config


def on_ray(**sizes: Any) -> SFTConfig:
    config = SFTConfig()
    config.trainer.runtime, config.trainer.n_gpus_per_node = "ray", 2
    for name, value in sizes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (on_ray(), None),
        (on_ray(tensor_model_parallel_size=2), "tensor_model_parallel_size"),
        (on_ray(ulysses_sequence_parallel_size=2), "ulysses_sequence_parallel_size"),
        (on_ray(strategy="megatron"), "strategy"),
    ],
)
def test_each_layout_without_images_is_one_error(config: Any, where: str | None) -> None:
    assert [finding.error.where for finding in image_limits(config)] == ([] if where is None else [where])


@pytest.mark.parametrize("kind", ["smolvlm", "qwen3_5", "gemma3", "gemma4"])
def test_vllm_gets_images_of_compared_types_only(kind: str) -> None:
    assert [finding.error.where for finding in image_limits(rl(name="vllm"), kind)] == [
        "actor_rollout_ref.rollout.name"
    ]


@pytest.mark.parametrize(
    ("config", "where"),
    [
        (rl(), None),
        (SFTConfig(), None),
        (rl(name="vllm"), None),
        (rl(name="sglang"), "actor_rollout_ref.rollout.name"),
        (rl(name="hf"), "actor_rollout_ref.rollout.name"),
        (rl(num_replicas=1), None),
        (lora(merge_lora=False), "actor_rollout_ref.rollout.merge_lora"),
        (rl(adv_estimator="gae"), "algorithm.adv_estimator"),
        (RewardModelConfig(), "model.path"),
    ],
)
def test_each_setting_without_images_is_one_error(config: Any, where: str | None) -> None:
    found = [finding.error.where for finding in image_limits(config)]
    assert found == ([] if where is None else [where])


def test_models_with_other_vision_towers_are_models_of_text(tmp_path: Path) -> None:
    settings = {"model_type": "gemma3n", "vision_config": {}, "image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    tokenizer: Any = None
    assert not reads_images(settings)
    assert load_image_processor(tmp_path, tokenizer) is None


@pytest.mark.parametrize("kind", ["llava", "paligemma", "qwen3_vl_moe"])
def test_a_type_for_images_alone_is_refused_by_name(kind: str) -> None:
    with raises(ModelError, kind, "gemma3", code="R86", where="model.path"):
        refuse_unread({"model_type": kind})


@pytest.mark.parametrize("kind", ["qwen3_5_moe", "gemma4", "mllama", "qwen3", "a type of one's own", None])
def test_a_type_that_is_read_or_has_a_model_of_text_is_not(kind: str | None) -> None:
    settings = {"model_type": kind}
    assert refuse_unread(settings) is None and settings == {"model_type": kind}
