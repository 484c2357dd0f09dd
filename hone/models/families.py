"""The model families that Hone registers itself."""

from __future__ import annotations

from typing import Any

from hone.models.registry import ModelFamily, RandomInit, Shape, register_model


def _experts(shape: Shape, context: int) -> dict[str, Any]:
    return {"moe_intermediate_size": shape.width, "num_experts": 4, "num_experts_per_tok": 2}


def _mixtral(shape: Shape, context: int) -> dict[str, Any]:
    return {"num_local_experts": 4, "num_experts_per_tok": 2}


def _gpt_oss(shape: Shape, context: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 150000.0}
    return {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": min(128, context),
        "rope_parameters": rope,
        # The default suits wide models. Without QK norm, a narrow model would start with near-uniform attention and learn to
        # copy slowly.
        "initializer_range": shape.hidden**-0.5,
    }


def _gemma(shape: Shape, context: int) -> dict[str, Any]:
    return {"sliding_window": min(512, context), "query_pre_attn_scalar": shape.head}


for _family in (
    ModelFamily("qwen3", llama_shaped=True, qk_norm=True, init=RandomInit("qwen3", "qwen3", tied=True)),
    ModelFamily("qwen2", llama_shaped=True, init=RandomInit("qwen2", "qwen2", tied=True)),
    ModelFamily("llama", llama_shaped=True, init=RandomInit("llama", "llama", tied=True)),
    ModelFamily("mistral", llama_shaped=True, init=RandomInit("mistral", "mistral", tied=False)),
    ModelFamily("gemma3_text", qk_norm=True, init=RandomInit("gemma", "gemma3_text", tied=True, settings=_gemma)),
    ModelFamily("gemma2", init=RandomInit("gemma2", "gemma2", tied=True, settings=_gemma)),
    ModelFamily("granite", init=RandomInit("granite", "granite", tied=True)),
    ModelFamily("olmo2", qk_norm=True, init=RandomInit("olmo2", "olmo2", tied=False)),
    ModelFamily("phi3", init=RandomInit("phi3", "phi3", tied=False)),
    ModelFamily("smollm3", init=RandomInit("smollm3", "smollm3", tied=True)),
    ModelFamily("mixtral", init=RandomInit("mixtral", "mixtral", tied=False, settings=_mixtral)),
    ModelFamily("gpt_oss", init=RandomInit("gpt_oss", "gpt_oss", tied=False, settings=_gpt_oss)),
    ModelFamily("qwen2_5_vl", init=RandomInit("qwen2_5_vl", "qwen2", tied=True)),
    ModelFamily("qwen3_vl", qk_norm=True, init=RandomInit("qwen3_vl", "qwen3", tied=True)),
    ModelFamily("smolvlm", init=RandomInit("smolvlm", "llama", tied=False)),
    ModelFamily("qwen3_moe", qk_norm=True, init=RandomInit("qwen3_moe", "qwen3_moe", tied=False, settings=_experts)),
):
    _ = register_model(_family)
