"""Models that an external engine serves, and cannot be given new weights of: it says so, and does not go on with the old ones."""

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


@pytest.mark.engines
@pytest.mark.timeout(600)
def test_vllm_serves_gpt_oss_and_refuses_new_weights_of_it(tmp_path):
    try:
        interpreter_of("vllm")
    except ConfigError as missing:
        pytest.skip(missing.what)
    old = gpt_oss(0)
    engine = start("vllm", save(old, tmp_path / "model"), tmp_path / "log").engine
    try:
        asked = requests(SamplingParams(max_tokens=8, temperature=0.0), 2)
        done = serve(engine, asked)
        for one in asked:
            assert_greedy(old, one, done[one.request_id], tolerance=1e-3)
        with pytest.raises(GenerationError, match="does not let new weights into .* layers") as raised:
            asyncio.run(engine.load_weights(gpt_oss(1).named_parameters(), 1))
        assert "rollout.name=native" in str(raised.value)
        with pytest.raises(GenerationError, match="only in part"):
            serve(engine, asked)
    finally:
        engine.close()
