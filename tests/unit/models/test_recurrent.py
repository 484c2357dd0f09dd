"""Families whose layers keep states (gated delta nets, Mamba2, short convolutions) pass the suite of families."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from support.families import DELTA, SIZES, model_of
from support.family_suite import ModelFamilySuite
from transformers import AutoConfig, PreTrainedConfig

from hone.data.model_settings import read_settings
from hone.models.registry import family_of

KINDS = ["linear_attention", "full_attention"]
EXPERTS = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS},
    "falcon_h1": MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **EXPERTS},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 1, "chunk_size": 8,
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32
    },
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        "layer_types": KINDS, "linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "qk_nope_head_dim": 4, "qk_head_dim": 8, "num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2,
        "num_key_value_heads": 4, "num_experts": 4, "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
FAST = ("qwen3_next", "falcon_h1", "lfm2")


def tiny(family: str) -> PreTrainedConfig:
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family]})


@pytest.fixture(
    params=[name if name in FAST else pytest.param(name, marks=pytest.mark.long("hone/models")) for name in FAMILIES]
)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


class TestRecurrent(ModelFamilySuite):
    @pytest.fixture
    def model(self, family: str) -> Any:
        return model_of(tiny(family))


def test_an_infinite_setting_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    tiny("granitemoehybrid").save_pretrained(tmp_path)
    settings = read_settings(tmp_path)
    assert settings["time_step_limit"] == [0.0, math.inf]
    assert family_of("granitemoehybrid").cache_size(settings).per_sequence > 0
