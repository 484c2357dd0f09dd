"""Tiny random models of several architectures."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from hone.generation import ENGINES
from hone.generation.protocol import Completion, Engine, GenerationRequest
from hone.models.registry import ARCHITECTURES
from hone.models.routing import use_hone_attention

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}


_KINDS = ["linear_attention", "full_attention"]
_DELTA_EXPERTS = {
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}  # fmt: skip
_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8,
    "mamba_d_ssm": 64,
}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **_DELTA_EXPERTS},
    "falcon_h1": _MAMBA,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {**_DELTA_EXPERTS, "layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**DELTA, **_DELTA_EXPERTS},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8,
        "n_groups": 1, "chunk_size": 8,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"head_dim": 16, "num_heads": 4, "expand": 2, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "falcon_mamba": {"state_size": 8},
    "minimax": {"layer_types": _KINDS, "block_size": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "num_experts": 4},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 32
    },
    "olmo_hybrid": DELTA,
    "kimi_linear": {
        "layer_types": _KINDS, "linear_head_dim": 8, "linear_num_heads": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "qk_nope_head_dim": 4, "qk_head_dim": 8, "num_expert_group": 1, "topk_group": 1, "num_experts_per_token": 2,
        "num_key_value_heads": 4, "num_experts": 4, "moe_intermediate_size": 16, "mlp_layer_types": ["dense", "sparse"],
    },
}  # fmt: skip
"""Families whose layers keep states, with settings of small ones besides `SIZES`."""


LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8, "qk_head_dim": 8,
    "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16,
}  # fmt: skip
"""Sizes of attention whose keys and values share a narrow state."""
ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}  # fmt: skip
"""Settings of small models whose routers add a bias to the scores of experts."""


def tiny_config(name: str) -> PretrainedConfig:
    match name:
        case "qwen3":
            return transformers.Qwen3Config(**SIZES)
        case "llama":
            return transformers.LlamaConfig(**SIZES)
        case "mistral":
            return transformers.MistralConfig(**SIZES, sliding_window=5)
        case "gemma2":
            return transformers.Gemma2Config(**SIZES, **WINDOWED, attn_logit_softcapping=2.0)
        case "gemma3" | "gemma":
            return transformers.Gemma3TextConfig(**SIZES, **WINDOWED)
        case "qwen3_5" | "qwen3_5_vl":
            return AutoConfig.for_model("qwen3_5_text", **SIZES, **DELTA)
        case "qwen3_5_moe_vl":
            return AutoConfig.for_model(
                "qwen3_5_moe_text", **SIZES, **DELTA, **EXPERTS, shared_expert_intermediate_size=16
            )
        case "gemma4":
            by_layer = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": SIZES["vocab_size"]}
            return AutoConfig.for_model("gemma4_text", **SIZES, **WINDOWED, **by_layer, global_head_dim=8)
        case "gpt_oss":
            return transformers.GptOssConfig(**SIZES, **WINDOWED, num_local_experts=4, num_experts_per_tok=2)
        case "nemotron" | "stablelm":
            return AutoConfig.for_model(name, **SIZES)
        case "deepseek_v3":
            return AutoConfig.for_model(
                name, **SIZES | LATENT | ROUTED | {"num_key_value_heads": 4, "v_head_dim": 12, "head_dim": 4}
            )
        case "longcat_flash":
            sizes = {**SIZES, **LATENT, "num_key_value_heads": 4, "head_dim": 4}
            return AutoConfig.for_model(name, **sizes, num_layers=2, n_routed_experts=4, zero_expert_num=2, moe_topk=2)
    if name in RECURRENT:
        return AutoConfig.for_model(name, **{**SIZES, **RECURRENT[name]})
    init = ARCHITECTURES.get(name)
    return AutoConfig.for_model(init.model_type, **SIZES, **(EXPERTS if name in ("mixtral", "qwen3_moe") else {}))


def tiny_model(name: str, *, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    return model_of(tiny_config(name), attention=attention, seed=seed)


def model_of(config: PretrainedConfig, *, attention: str = "eager", seed: int = 0) -> PreTrainedModel:
    """A random model, with distributions far from uniform."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
    return model.eval()


class Letters:
    """A tokenizer of one letter a token, for stop strings."""

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(chr(48 + i) for i in ids)


def serve(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Completion]:
    async def collect() -> dict[str, Completion]:
        return {completion.request_id: completion async for completion in engine.generate(requests)}

    return asyncio.run(collect())


def make_engine(model: torch.nn.Module, name: str = "native", **changes: object) -> Engine:
    use_hone_attention(model)
    limits: dict[str, object] = {"max_num_seqs": 8, "max_cache_tokens": None, "max_model_len": 128}
    given = {"dtype": "float32", "device": torch.device("cpu"), "tokenizer": Letters(), **limits, **changes}
    return ENGINES.get(name)(model=model, **given)
