"""Models whose weights an external engine takes in ways of its own."""

from __future__ import annotations

import asyncio

import pytest
import transformers
from support.engine_cases import SHAPE, assert_greedy, decided, requests, save, serve, start
from transformers import PreTrainedModel

from hone.errors import ConfigError, GenerationError
from hone.generation.environments import interpreter_of
from hone.generation.protocol import SamplingParams


def gpt_oss(seed: int) -> PreTrainedModel:
    """Of GPT-OSS's shape: experts, sinks, windows."""
    sizes = {**SHAPE, "head_dim": 64, "hidden_size": 128, "intermediate_size": 128}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32, "tie_word_embeddings": False}
    return decided(transformers.GptOssConfig(**{**sizes, **experts}), seed)


def qwen3_moe(seed: int) -> PreTrainedModel:
    """Qwen3 with experts, which transformers holds as one tensor a layer and the engines' loaders want one by one."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    return decided(transformers.Qwen3MoeConfig(**{**SHAPE, **experts, "tie_word_embeddings": False}), seed)


@pytest.mark.engines
@pytest.mark.parametrize(("name", "make"), [("vllm", gpt_oss), ("vllm", qwen3_moe), ("sglang", qwen3_moe)])
def test_new_weights_of_experts_arrive(tmp_path, name, make):
    """On a CPU vLLM packs experts, once; and the loader of GPT-OSS copies them past the reload that makes layers anew."""
    try:
        interpreter_of(name)
    except ConfigError as missing:
        pytest.skip(missing.what)
    models = [make(seed) for seed in range(3)]
    subject = start(name, save(models[0], tmp_path / "model"), tmp_path / "log")
    engine = subject.engine
    try:
        asked = requests(SamplingParams(max_tokens=8, temperature=0.0), 2)
        for version, model in enumerate(models):
            if version:
                asyncio.run(subject.take(model, version))
            done = serve(engine, asked)
            for one in asked:
                assert_greedy(model, one, done[one.request_id], tolerance=1e-3)
        partly = [(name, tensor) for name, tensor in models[0].named_parameters() if "experts" not in name]
        with pytest.raises(GenerationError, match="have not arrived"):
            asyncio.run(engine.load_weights(partly, 3))
        with pytest.raises(GenerationError, match="only in part"):
            serve(engine, asked)
    finally:
        engine.close()
