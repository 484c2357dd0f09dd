"""Tiny random models of several architectures."""

from __future__ import annotations

import asyncio

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
        case "qwen3_5":
            return AutoConfig.for_model("qwen3_5_text", **SIZES, **DELTA)
        case "gpt_oss":
            return transformers.GptOssConfig(**SIZES, **WINDOWED, num_local_experts=4, num_experts_per_tok=2)
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
