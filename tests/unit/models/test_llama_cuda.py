"""The fused executor for CUDA, with its operators' references on the CPU, against the model's own module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from hone.models.attention.packed import PackedContext
from hone.models.kernels import cuda as kernels
from hone.models.llama import cuda
from hone.models.routing import use_hone_attention

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
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
    "mistral, a window": transformers.MistralConfig(**SHAPE, sliding_window=4),
}
LENGTHS, SHARED = [12, 6, 14, 11], [0, 5, 0, 9]
TOKENS = sum(LENGTHS) - sum(SHARED)


def model_of(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    use_hone_attention(model)
    return model


def by_module(model: Any, ids: Tensor, context: PackedContext) -> Tensor:
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
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return hidden.detach(), gradients


@pytest.mark.parametrize("checkpointing", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_gradients_are_those_of_the_module(name: str, checkpointing: bool) -> None:
    model = model_of(CONFIGS[name])
    assert cuda.is_supported_model(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
    wanted_hidden, wanted = outcome(by_module, model)
    hidden, gradients = outcome(cuda.hidden_states, model)
    torch.testing.assert_close(hidden, wanted_hidden, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for parameter, gradient in wanted.items():
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-4, atol=1e-5 * scale, msg=parameter)


def test_bfloat16_keeps_the_residual_stream_and_weight_gradients_in_float32() -> None:
    model = model_of(CONFIGS["qwen3"])
    exact, _ = outcome(by_module, model)
    module_hidden, _ = outcome(by_module, model, bfloat16=True)
    hidden, gradients = outcome(cuda.hidden_states, model, bfloat16=True)
    assert hidden.dtype == torch.bfloat16
    error, of_module = ((part.float() - exact).abs().mean() for part in (hidden, module_hidden))
    assert error < 1.5 * of_module
    down = gradients["model.layers.0.mlp.down_proj.weight"]
    assert down.dtype == torch.float32 and not torch.equal(down, down.bfloat16().float())


def test_layer_outputs_are_observed_as_the_modules() -> None:
    model, context = model_of(CONFIGS["qwen3"]), PackedContext.from_lengths([7])
    ids, outputs, hooked = torch.arange(7)[None], [], []
    token = cuda.LAYER_OBSERVER.set(lambda index, hidden: outputs.append((index, hidden)))
    cuda.hidden_states(model, ids, context)
    cuda.LAYER_OBSERVER.reset(token)
    for layer in model.get_decoder().layers:
        layer.register_forward_hook(lambda module, inputs, output: hooked.append(output[0]))
    by_module(model, ids, context)
    assert [index for index, _ in outputs] == [0, 1, 2]
    for (_, found), wanted in zip(outputs, hooked, strict=True):
        torch.testing.assert_close(found, wanted.view_as(found), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "config", [transformers.LlamaConfig(**SHAPE, hidden_act="gelu"), transformers.LlamaConfig(**SHAPE, mlp_bias=True)]
)
def test_other_activations_and_biases_go_through_the_module(config: PretrainedConfig) -> None:
    assert not cuda.is_supported_model(model_of(config))


def test_the_executor_is_not_for_the_cpu() -> None:
    model = model_of(CONFIGS["qwen3"])
    assert not cuda.supports_training(model) and kernels.available(torch.device("meta"))
