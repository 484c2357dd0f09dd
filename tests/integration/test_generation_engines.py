"""The two engines together, and both against a full forward pass and transformers' own sampling rules."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerFast

from hone.data.types import StopReason
from hone.generation import ENGINES
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.models.routing import attention_of, use_hone_attention

LETTERS = [chr(code) for code in range(62, 123)]
SIZES = {
    "vocab_size": len(LETTERS),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
CONFIGS = {
    "qwen3": lambda: transformers.Qwen3Config(**SIZES),
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, **LAYERS, attn_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SIZES, **LAYERS),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, **LAYERS, num_local_experts=4, num_experts_per_tok=2),
}
SAMPLINGS = {
    "plain": SamplingParams(max_tokens=24, temperature=0.8),
    "top-k": SamplingParams(max_tokens=24, top_k=7),
    "top-p": SamplingParams(max_tokens=24, temperature=1.3, top_p=0.7),
    "min-p": SamplingParams(max_tokens=24, min_p=0.2),
    "penalty": SamplingParams(max_tokens=24, repetition_penalty=1.4),
    "all": SamplingParams(max_tokens=24, temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, repetition_penalty=1.2),
}


KINDS = ["native", pytest.param("hf", marks=pytest.mark.application("hone/generation", "hone/models"))]


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config.top_k, model.generation_config.temperature = 3, 0.1  # no engine may look at them
    use_hone_attention(model)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token=LETTERS[0]))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=LETTERS[0])


def run(name: str, model: PreTrainedModel, tokenizer: object, asked: list[GenerationRequest]) -> dict[str, Completion]:
    engine = ENGINES.get(name)(
        model=model,
        tokenizer=tokenizer,
        device=torch.device("cpu"),
        dtype="float32",
        max_num_seqs=4,
        max_cache_tokens=None,
        max_model_len=64,
    )

    async def collect() -> dict[str, Completion]:
        return {completion.request_id: completion async for completion in engine.generate(asked)}

    assert engine.describe().name == name
    return asyncio.run(collect())


def requests(sampling: SamplingParams, count: int = 7) -> list[GenerationRequest]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 61, (1 + 3 * i,), generator=generator).tolist() for i in range(count)]
    return [GenerationRequest(str(i), prompt, sampling, seed=i) for i, prompt in enumerate(prompts)]


def expected_log_probs(model: PreTrainedModel, asked: GenerationRequest, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Raw and sampling log-probs by one forward pass without cache and transformers' processors, token by token."""
    ids, start = torch.tensor([asked.prompt_ids + tokens]), len(asked.prompt_ids)
    with attention_of(model, "eager"), torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0].float()
    p, processors = asked.sampling, LogitsProcessorList()
    if p.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(p.repetition_penalty))
    processors.append(transformers.TemperatureLogitsWarper(p.temperature))
    if p.top_k > 0:
        processors.append(transformers.TopKLogitsWarper(p.top_k))
    if p.top_p < 1:
        processors.append(transformers.TopPLogitsWarper(p.top_p))
    if p.min_p > 0:
        processors.append(transformers.MinPLogitsWarper(p.min_p))
    raw, drawn = [], []
    for at, token in enumerate(tokens, start=start):
        row = logits[at - 1 : at]
        raw.append((row / p.temperature).log_softmax(-1)[0, token])
        drawn.append(processors(ids[:, :at], row.clone()).log_softmax(-1)[0, token])  # type: ignore[arg-type]
    return torch.stack(raw), torch.stack(drawn)


def test_both_engines_take_the_same_greedy_tokens(model, tokenizer):
    asked = requests(SamplingParams(max_tokens=30, temperature=0.0, stop_token_ids=(9, 17)))
    native, golden = run("native", model, tokenizer, asked), run("hf", model, tokenizer, asked)
    reasons = set()
    for key, expected in golden.items():
        got = native[key]
        assert (got.token_ids, got.stop_reason) == (expected.token_ids, expected.stop_reason)
        torch.testing.assert_close(torch.tensor(got.log_probs), torch.tensor(expected.log_probs), atol=1e-4, rtol=0)
        assert got.sampling_log_probs == got.log_probs
        reasons.add(got.stop_reason)
    assert StopReason.LENGTH in reasons


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("engine", KINDS)
def test_log_probs_equal_a_full_forward_pass(model, tokenizer, engine, name):
    asked = requests(SAMPLINGS[name])
    done = run(engine, model, tokenizer, asked)
    for one in asked:
        got = done[one.request_id]
        assert len(got.token_ids) == 24
        raw, drawn = expected_log_probs(model, one, got.token_ids)
        torch.testing.assert_close(torch.tensor(got.log_probs), raw, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.tensor(got.sampling_log_probs), drawn, atol=1e-4, rtol=0)
        assert got.support_sizes == []


@pytest.mark.parametrize("engine", KINDS)
def test_the_support_of_a_token_renormalises_its_log_prob(model, tokenizer, engine):
    sampling = SamplingParams(max_tokens=24, top_k=9, top_p=0.8, temperature=1.3, ignore_eos=True, report_support=True)
    plain = dataclasses.replace(sampling, top_k=-1, top_p=1.0)
    asked = [*requests(sampling), dataclasses.replace(requests(plain)[0], request_id="plain")]
    done = run(engine, model, tokenizer, asked)
    assert (done["plain"].support_sizes, done["plain"].support_ids) == ([], [])
    for one in asked[:-1]:
        got = done[one.request_id]
        with attention_of(model, "eager"), torch.no_grad():
            logits = model(input_ids=torch.tensor([one.prompt_ids + got.token_ids]), use_cache=False).logits[0].float()
        scores = (logits / 1.3).log_softmax(-1)[len(one.prompt_ids) - 1 : -1]
        assert (
            len(got.support_sizes) == 24
            and max(got.support_sizes) <= 9
            and sum(got.support_sizes) == len(got.support_ids)
        )
        ids = iter(got.support_ids)
        for row, token, size, drawn in zip(
            scores, got.token_ids, got.support_sizes, got.sampling_log_probs, strict=True
        ):
            support = [next(ids) for _ in range(size)]
            assert token in support and support == sorted(set(support))
            assert float(row[token] - row[support].logsumexp(0)) == pytest.approx(drawn, abs=1e-4)


@pytest.mark.parametrize("engine", KINDS)
def test_stop_strings_are_kept_and_end_the_response(model, tokenizer, engine):
    free = run(engine, model, tokenizer, requests(SamplingParams(max_tokens=30, temperature=0.0), 3))
    for key, whole in free.items():
        stop = tokenizer.decode(whole.token_ids)[4:7]
        sampling = SamplingParams(max_tokens=30, temperature=0.0, stop=(stop, "aaaaaaaa"))
        got = run(engine, model, tokenizer, requests(sampling, 3))[key]
        assert tokenizer.decode(got.token_ids).endswith(stop)
        assert got.token_ids == whole.token_ids[: len(got.token_ids)]
        assert got.stop_reason is StopReason.STOP


def test_the_golden_path_leaves_the_model_as_it_was(model, tokenizer):
    before = (model.training, model.generation_config, model.config._attn_implementation)
    random = torch.get_rng_state()
    run("hf", model, tokenizer, requests(SAMPLINGS["plain"], 2))
    assert (model.training, model.generation_config, model.config._attn_implementation) == before
    assert before[2] == "hone" and torch.equal(torch.get_rng_state(), random)
