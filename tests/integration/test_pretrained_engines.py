"""Engines over a pretrained model: greedy tokens and log-probs are those of transformers, before and after a weight sync."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.engine_cases import assert_greedy, expected_log_probs, plan, serve
from support.real_model import smollm2
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hone.errors import ConfigError
from hone.generation.environments import interpreter_of
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.generation.remote import ServedEngine

QUESTIONS = ("What is the capital of France?", "Write a haiku about rain.", "What is 7 + 5?", "Name three colours.")
KINDS = [
    pytest.param(
        "native", marks=pytest.mark.long("hone/generation/hf.py", "hone/generation/remote", "hone/generation/server")
    ),
    pytest.param("vllm", marks=pytest.mark.engines),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2(tmp_path_factory)


@pytest.fixture(scope="module")
def reference(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="module", params=KINDS)
def engine(
    request: pytest.FixtureRequest, path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedEngine]:
    try:
        interpreter_of(request.param)
    except ConfigError as missing:
        pytest.skip(missing.what)
    launch = plan(request.param, path, tmp_path_factory.mktemp("logs") / "engine.log")
    served = ServedEngine.start(dataclasses.replace(launch, max_num_seqs=8, max_cache_tokens=8 * 256))
    yield served
    served.close()


def chats(path: Path, sampling: SamplingParams) -> list[GenerationRequest]:
    tokenizer = AutoTokenizer.from_pretrained(path)
    return [
        GenerationRequest(
            str(number),
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
            ),
            sampling,
            seed=number,
        )
        for number, question in enumerate(QUESTIONS)
    ]


def test_tokens_and_log_probs_are_the_reference_s(engine: ServedEngine, path: Path, reference: PreTrainedModel) -> None:
    greedy = chats(path, SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    answers = serve(engine, greedy)
    for asking in greedy:
        assert_greedy(reference, asking, answers[asking.request_id], tolerance=2e-3)
    sampled = chats(path, SamplingParams(max_tokens=12, temperature=0.8, top_k=20, ignore_eos=True))
    answers = serve(engine, sampled)
    for asking in sampled:
        answer = answers[asking.request_id]
        raw, restricted = expected_log_probs(reference, asking, answer.token_ids)
        torch.testing.assert_close(torch.tensor(answer.log_probs), raw, atol=2e-3, rtol=0)
        torch.testing.assert_close(torch.tensor(answer.sampling_log_probs), restricted, atol=2e-3, rtol=0)


def test_new_weights_are_used(engine: ServedEngine, path: Path, reference: PreTrainedModel) -> None:
    changed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(0.97)
    asyncio.run(engine.load_weights(changed.named_parameters(), 1))
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    asking = chats(path, sampling)
    answers = serve(engine, asking)
    for request in asking:
        assert_greedy(changed, request, answers[request.request_id], tolerance=2e-3)
        before, _ = expected_log_probs(reference, request, answers[request.request_id].token_ids)
        assert (torch.tensor(answers[request.request_id].log_probs) - before).abs().max() > 0.02
    asyncio.run(engine.load_weights(reference.named_parameters(), 2))
