"""The forward pass in few operations against the model's own module, for every architecture it takes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from hone.models.attention.packed import PackedContext
from hone.models.kernels import cuda
from hone.models.llama.choice import generation_forward
from hone.models.llama.cuda import FusedDecodeForward, hidden_states
from hone.models.llama.decode import DecodeForward
from hone.models.llama.spec import supports
from hone.models.module_forward import ModuleForward
from hone.models.routing import use_hone_attention

FUSED = ("llama", "mistral", "qwen3", "qwen2")
LENGTHS = [7, 1, 12]
EXECUTORS = [DecodeForward, FusedDecodeForward]
"""That of CPUs, and that of CUDA, whose operators have a reference for the CPU."""


def model_of(make_model, name: str) -> Any:
    if name == "qwen2":  # projections with a bias, tied embeddings
        config = transformers.Qwen2Config(
            vocab_size=61,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=1,
        )
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.15)
    else:
        model = make_model(name)
    use_hone_attention(model)
    return model


def logits(forward: DecodeForward | ModuleForward) -> torch.Tensor:
    ids = torch.arange(sum(LENGTHS))[None] % 50 + 3
    with torch.no_grad(), forward.computing():
        return forward.logits(ids, PackedContext.from_lengths(LENGTHS))


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", FUSED)
def test_logits_equal_the_modules(make_model, name, executor):
    model = model_of(make_model, name)
    assert supports(model)
    expected = logits(ModuleForward(model, dtype=torch.float32))
    torch.testing.assert_close(logits(executor(model, dtype=torch.float32)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", FUSED)
def test_bfloat16_is_as_near_to_float32_as_the_modules(make_model, name, executor):
    model = model_of(make_model, name)
    exact = logits(ModuleForward(model, dtype=torch.float32))
    own = (logits(ModuleForward(model, dtype=torch.bfloat16)).float() - exact).abs().mean()
    fused = (logits(executor(model, dtype=torch.bfloat16)).float() - exact).abs().mean()
    assert 0 < fused < 1.5 * own


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", FUSED)
def test_parameters_in_bfloat16_give_what_the_modules_give(make_model, name, executor):
    model = model_of(make_model, name)
    exact = logits(ModuleForward(model, dtype=torch.float32))
    model.to(torch.bfloat16)
    own = (logits(ModuleForward(model, dtype=torch.bfloat16)).float() - exact).abs().mean()
    fused = (logits(executor(model, dtype=torch.bfloat16)).float() - exact).abs().mean()
    assert 0 < fused < 1.5 * own


@pytest.mark.parametrize("executor", EXECUTORS)
def test_weights_are_taken_once_and_again_after_release(make_model, executor):
    model = model_of(make_model, "qwen3")
    forward = executor(model, dtype=torch.float32)
    before, weights = logits(forward), forward._weights
    assert torch.equal(logits(forward), before)
    assert forward._weights is weights
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    forward.release()
    assert forward._weights is None
    torch.testing.assert_close(logits(forward), logits(ModuleForward(model, dtype=torch.float32)), rtol=1e-5, atol=1e-5)
    assert (logits(forward) - before).abs().max() > 1e-3


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_token_alone(make_model, executor):
    model = model_of(make_model, "qwen3")
    forwards = [kind(model, dtype=torch.float32) for kind in (executor, ModuleForward)]
    found = []
    for forward in forwards:
        with torch.no_grad(), forward.computing():
            found.append(forward.logits(torch.tensor([[5]]), PackedContext.from_lengths([1])))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_the_executor_is_that_of_the_device(make_model, monkeypatch):
    model = model_of(make_model, "qwen3")
    assert type(generation_forward(model, dtype=torch.bfloat16)) is DecodeForward
    monkeypatch.setattr(cuda, "available", lambda device: True)
    assert type(generation_forward(model, dtype=torch.bfloat16)) is FusedDecodeForward
    assert type(generation_forward(make_model("gemma2"), dtype=torch.bfloat16)) is ModuleForward


@pytest.mark.parametrize("name", FUSED)
def test_engine_and_trainer_round_alike_on_cuda(make_model, name):
    """In bfloat16 the last hidden states of both are the same bits, and logits are not rounded."""
    model = model_of(make_model, name)
    ids, context = torch.arange(sum(LENGTHS))[None] % 50 + 3, PackedContext.from_lengths(LENGTHS)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        trained = hidden_states(model, ids, context)
    forward = FusedDecodeForward(model, dtype=torch.bfloat16)
    with forward.computing():
        assert torch.equal(forward.hidden(ids, context), trained)
        found = forward.logits(ids, context)
    weight = model.get_output_embeddings().weight.detach().to(torch.bfloat16)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, trained.float() @ weight.float().t(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
def test_other_architectures_go_through_their_module(make_model, name):
    assert not supports(make_model(name))


def test_adapters_go_through_their_module(make_model):
    model = get_peft_model(make_model("qwen3"), LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM"))
    assert not supports(model.get_base_model())


def test_a_model_that_scales_its_logits_goes_through_its_module(make_model):
    class Scaled(transformers.Qwen3ForCausalLM):
        pass

    model = Scaled(make_model("qwen3").config)
    assert not supports(model)
