"""The training forward pass in few operations against the model's own module, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from hone.models.attention.packed import PackedContext
from hone.models.llama import train
from hone.models.llama.spec import replace_layer_forwards
from hone.models.routing import use_hone_attention

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "qwen2, biases and a window": transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "llama, tied": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama, gelu": transformers.LlamaConfig(**SHAPE, hidden_act="gelu"),
    "mistral, a window": transformers.MistralConfig(**SHAPE, sliding_window=4),
}
LENGTHS, SHARED = [12, 6, 14, 11], [0, 5, 0, 9]
TOKENS = sum(LENGTHS) - sum(SHARED)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    use_hone_attention(model)
    return model


def own(model: Any, ids: Tensor, context: PackedContext) -> Tensor:
    return model.get_decoder()(
        input_ids=ids, position_ids=context.position_ids, context=context, use_cache=False
    ).last_hidden_state


def outcome(forward: Any, model: Any, *, bfloat16: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states, and the gradient of every parameter."""
    ids = torch.arange(TOKENS)[None] % 50 + 3
    incoming = torch.randn(1, TOKENS, 32, generator=torch.Generator().manual_seed(1))
    context = PackedContext.from_lengths(LENGTHS, shared=SHARED)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        hidden = forward(model, ids, context)
    (hidden * incoming).sum().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return hidden.detach(), found


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_gradients_equal_the_modules(name):
    model = model_of(name)
    assert train.supports_training(model)
    expected, wanted = outcome(own, model)
    found, gradients = outcome(train.hidden_states, model)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-4, atol=1e-5 * scale, msg=parameter)


@pytest.mark.parametrize("name", ["qwen3", "llama, tied"])
def test_bfloat16_is_as_near_to_float32_as_the_modules(name):
    model = model_of(name)
    exact, wanted = outcome(own, model)
    theirs, their_gradients = outcome(own, model, bfloat16=True)
    ours, our_gradients = outcome(train.hidden_states, model, bfloat16=True)
    assert 0 < (ours - exact).norm() < 1.5 * (theirs - exact).norm()

    def distance(found: dict[str, Tensor]) -> float:
        return sum(float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted)

    assert 0 < distance(our_gradients) < 1.5 * distance(their_gradients)


def test_the_norm_has_the_gradients_of_finite_differences():
    def numbers(*shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    assert torch.autograd.gradcheck(lambda x, w: train._RMSNorm.apply(x, w, 1e-3), (numbers(3, 4), numbers(4)))


@pytest.mark.parametrize("obstacle", ["adapter", "hook", "another kind"])
def test_what_it_does_not_know_goes_through_the_module(obstacle):
    model = model_of("qwen3")
    if obstacle == "adapter":
        model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).get_base_model()
    elif obstacle == "hook":
        model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    else:
        model = AutoModelForCausalLM.from_config(transformers.GemmaConfig(**SHAPE))
    assert not train.supports_training(model)


@pytest.mark.parametrize("as_modules", [False, True])
def test_gradient_checkpointing_keeps_less_and_changes_no_bit(as_modules):
    def outcome_and_kept(model: Any) -> tuple[Tensor, dict[str, Tensor], int]:
        kept = 0

        def count(states: Tensor) -> Tensor:
            nonlocal kept
            kept += 0 if isinstance(states, nn.Parameter) else states.nbytes
            return states

        with torch.autograd.graph.saved_tensors_hooks(count, lambda states: states):
            return *outcome(own if as_modules else train.hidden_states, model), kept

    model = model_of("qwen3").train()
    if as_modules:
        replace_layer_forwards(model, train.layer_forward)
    hidden, gradients, kept = outcome_and_kept(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    again, same, less = outcome_and_kept(model)
    assert 0 < less < kept / 4
    assert torch.equal(again, hidden)
    assert gradients.keys() == same.keys()
    assert all(torch.equal(same[name], gradient) for name, gradient in gradients.items())
