"""vLLM with an adapter that is swapped without being worked into the weights: the oracle is PEFT, without a cache."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.engine_cases import assert_greedy, collect, make_model, plan, requests, save, serve
from support.messages import raises
from support.patience import SOON

from hone.data.types import StopReason
from hone.errors import ConfigError, GenerationError
from hone.generation.environments import interpreter_of
from hone.generation.protocol import SamplingParams
from hone.generation.remote import ServedEngine
from hone.training.export_stream import adapter_weights

GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
RANK, ALPHA = 5, 12


def adapted(seed: int) -> PeftModel:
    """The first policy with an adapter that changes what it says."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(make_model("tied"), config)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.engines
def test_vllm_swaps_adapters_and_nothing_of_the_one_before_is_left(tmp_path):
    try:
        interpreter_of("vllm")
    except ConfigError as missing:
        pytest.skip(missing.what)
    path = save(make_model("tied"), tmp_path / "model")
    wanted = dataclasses.replace(plan("vllm", path, tmp_path / "log"), lora={"r": RANK, "lora_alpha": ALPHA})
    engine = ServedEngine.start(wanted, bucket_bytes=3000)
    asked = requests(GREEDY, 4, shortest=100)
    first, second = adapted(1), adapted(2)
    try:
        for version, model in enumerate((make_model("tied"), first, second, first)):
            if version:
                asyncio.run(engine.load_weights(adapter_weights(model), version))
            for _ in range(2):  # the second time from the cache
                done = serve(engine, asked)
                for one in asked:
                    assert_greedy(model, one, done[one.request_id])
                    assert done[one.request_id].weight_versions == (version, version)
        _changes_in_mid_flight(engine, second)
        _refuses_a_part(engine, list(adapter_weights(first)))
    finally:
        engine.close()


def _changes_in_mid_flight(engine: ServedEngine, model: PeftModel) -> None:
    """What is under way goes on with the new adapter, and its versions say so."""
    long = requests(SamplingParams(max_tokens=150, temperature=0.0, ignore_eos=True), 2)

    async def change():
        task = asyncio.create_task(collect(engine, long))
        await asyncio.sleep(0.1)
        await engine.pause()
        await engine.load_weights(adapter_weights(model), 4)
        await engine.resume()
        return await asyncio.wait_for(task, SOON)

    for one in long:
        got = asyncio.run(change())[one.request_id]
        assert (len(got.token_ids), got.stop_reason, got.weight_versions[1]) == (150, StopReason.LENGTH, 4)
        rest = dataclasses.replace(one, prompt_ids=one.prompt_ids + got.token_ids[:-30])
        tail = dataclasses.replace(got, token_ids=got.token_ids[-30:], log_probs=got.log_probs[-30:])
        assert_greedy(model, rest, tail)


def _refuses_a_part(engine: ServedEngine, parameters: list[tuple[str, torch.Tensor]]) -> None:
    asked = requests(GREEDY, 1)
    with raises(GenerationError, f"1 of {len(parameters)}"):
        asyncio.run(engine.load_weights(parameters[:-1], 5))
    with raises(GenerationError, "version 5"):
        serve(engine, asked)
    with raises(GenerationError, "merge_lora=true"):
        asyncio.run(engine.load_weights(make_model("tied").named_parameters(), 6))
    asyncio.run(engine.load_weights(parameters, 7))
    assert serve(engine, asked)["0"].weight_versions == (7, 7)
