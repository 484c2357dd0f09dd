"""Models whose weights an external engine takes in ways of its own."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
import transformers
from support.engine_cases import SHAPE, assert_greedy, decided, requests, save, serve, start
from transformers import PreTrainedModel

from hone.errors import ConfigError, GenerationError
from hone.generation.environments import interpreter_of
from hone.generation.protocol import SamplingParams
from hone.models.experts import expert_routers


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
def test_sglang_reports_the_experts_of_every_token(tmp_path):
    """Also of tokens whose keys and values come from the cache of an earlier request. On a CPU it cannot, and is refused."""
    try:
        interpreter_of("sglang")
    except ConfigError as missing:
        pytest.skip(missing.what)
    model = qwen3_moe(0)
    where = (save(model, tmp_path / "model"), tmp_path / "log")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="experts of a token on a CPU"):
            start("sglang", *where, enable_return_routed_experts=True)
        return
    subject = start("sglang", *where, enable_return_routed_experts=True)
    routers = expert_routers(model)
    assert routers is not None
    try:
        for _ in range(2):
            sent = requests(SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True), 4)
            for request, completion in ((one, serve(subject.engine, [one])[one.request_id]) for one in sent):
                ids = [*request.prompt_ids, *completion.token_ids][:-1]
                routers.record()
                with torch.no_grad():
                    model(torch.tensor([ids]))
                expected = routers.take_recorded().numpy().reshape(-1, 2)
                reported = np.asarray(completion.expert_ids).reshape(-1, 2)
                assert reported.shape == expected.shape
                assert (
                    np.sort(reported, 1) == np.sort(expected, 1)
                ).mean() > 0.98  # almost equal scores may change places
    finally:
        subject.engine.close()


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
