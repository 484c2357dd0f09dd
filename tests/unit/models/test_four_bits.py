"""A frozen base in 4 bits: the values of the NF4 table, one base for engine and trainer, exact resumes, exports of what was trained."""

import dataclasses
import json
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.families import EXPERTS, SIZES, make_engine, model_of, serve, tiny_model
from support.family_suite import log_probs, prompt, request
from support.messages import raises
from support.models import random_batch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerFast

from hone.config.model import ModelConfig, OptimConfig
from hone.data.tokenizer import load_tokenizer
from hone.errors import ConfigError, ModelError
from hone.extras import install_command
from hone.models import four_bits
from hone.models.compiled import compile_layers
from hone.models.four_bits import RECORD, PackedLinear, packed_base, packed_layers, rounded
from hone.models.heads import PolicyHead
from hone.models.loading import adapter_off, causal_lm, load_policy, load_reward_model, load_value_model, saved_model
from hone.training.backends.local import LocalBackend
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import stage_weights
from hone.training.engine import TrainSettings
from hone.training.export import export
from hone.training.objectives import imitation_objective

CPU = torch.device("cpu")
NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
"""Quantiles of the normal distribution (QLoRA, appendix E)."""
needs_package = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Make the directory of a tiny model of a family once."""
    made = {}

    def make(family):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            tiny_model(family).save_pretrained(made[family])
        return str(made[family])

    return make


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    inner = Tokenizer(models.WordLevel({f"w{number}": number for number in range(61)}, unk_token="w0"))
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", pad_token="w2").save_pretrained(folder)
    return load_tokenizer(str(folder))


def packed_policy(path, **changes):
    config = ModelConfig(path, quantization="nf4", lora_rank=4)
    return load_policy(dataclasses.replace(config, **changes), device=CPU, seed=3)


def slowly(values, levels):
    """Round block by block and number by number, as the paper says."""
    numbers, result = values.flatten().tolist(), []
    for start in range(0, len(numbers), 64):
        block = numbers[start : start + 64]
        scale = max(abs(number) for number in block)
        result += [scale * min(levels, key=lambda level: abs(level - number / scale)) for number in block]
    return torch.tensor(result).view(values.shape)


@needs_package
@pytest.mark.parametrize("method", ["nf4", "int8"])
@pytest.mark.parametrize("shape", [(64, 64), (7, 36), (3, 5), (1, 1), (10, 130)])
def test_values_are_those_of_the_table(shape, method):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    levels = NF4 if method == "nf4" else [number / 127 for number in range(-127, 128)]
    torch.testing.assert_close(rounded(values, method), slowly(values, levels), rtol=1e-6, atol=0)
    layer = PackedLinear(nn.Linear(shape[1], shape[0]), method)
    layer.pack(values)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(layer.values(dtype), rounded(values, method).to(dtype))
    blocks = -(-values.numel() // 64)
    assert layer.weight.nbytes == (
        (values.numel() + 1) // 2 if method == "nf4" else 64 * blocks
    ) and layer.scales.numel() == -(-values.numel() // 64)


@needs_package
@pytest.mark.parametrize("method", ["nf4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_computes_as_a_linear_one_with_the_rounded_matrix(dtype, method):
    torch.manual_seed(0)
    plain = nn.Linear(48, 20)
    packed = PackedLinear(plain, method)
    packed.pack(plain.weight.detach())
    plain.weight.data = rounded(plain.weight.data, method)
    plain.requires_grad_(False)
    found = []
    for layer in (plain, packed):
        states = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            out = layer(states)
        assert out.dtype is dtype
        out.float().square().sum().backward()
        found += [(out, states.grad)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@needs_package
@pytest.mark.parametrize(
    ("family", "method"),
    [*((family, "nf4") for family in ("qwen3", "llama", "gemma3", "qwen3_5", "falcon_h1")), ("qwen3", "int8")],
)
def test_engine_and_trainer_compute_with_the_same_rounded_base(directory, family, method):
    model = packed_policy(directory(family), quantization=method)
    plain = packed_policy(directory(family), quantization="none")
    names = {f"{name}.weight" for name, _ in packed_layers(model)}
    weights = {name.replace(".base_layer", ""): weight for name, weight in causal_lm(plain).named_parameters()}
    with torch.no_grad():
        for name in names:
            weights[name].copy_(rounded(weights[name], method))
        for one, other in zip(_adapters(model), _adapters(plain), strict=True):
            one.add_(torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())) * 0.1)
            other.copy_(one)
    requests = [request(f"{number}", prompt(number, 3 + 4 * number)) for number in range(4)]
    done = serve(make_engine(model), requests)
    trained = log_probs(model, requests, done)
    sampled = [value for one in requests for value in done[one.request_id].log_probs]
    assert trained == pytest.approx(sampled, abs=1e-5)
    assert trained == pytest.approx(log_probs(plain, requests, done), abs=1e-5)
    with adapter_off(model), adapter_off(plain):
        reference = log_probs(model, requests, done)
        assert reference == pytest.approx(log_probs(plain, requests, done), abs=1e-5)
    assert reference != pytest.approx(trained, abs=1e-2)


def _adapters(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@needs_package
def test_no_second_copy_of_the_base_is_held(directory):
    model = packed_policy(directory("qwen3"))
    floats = sum(p.numel() for p in model.parameters() if p.is_floating_point() and not p.requires_grad)
    plain = tiny_model("qwen3")
    layers = sum(p.numel() for p in plain.model.layers.parameters() if p.dim() > 1)
    assert floats == plain.num_parameters() - layers
    held = sum(layer.weight.nbytes + layer.scales.nbytes for _, layer in packed_layers(model))
    assert held == pytest.approx(0.5625 * layers, rel=0.01)


@needs_package
def test_a_value_model_is_whole_and_a_reward_model_is_packed(directory):
    config = ModelConfig(directory("qwen3"), quantization="nf4", lora_rank=4)
    assert not list(packed_layers(load_value_model(config, device=CPU)))
    scores = load_reward_model(config, device=CPU)
    assert len(list(packed_layers(scores))) == 2 * 7
    assert {"score" in name for name, p in scores.named_parameters() if p.requires_grad} == {True, False}


@needs_package
def test_a_resumed_training_is_exact_and_its_base_does_not_change(directory, tmp_path):
    def backend(config):
        model = load_policy(config, device=CPU, seed=3)
        return LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=1e-2)))

    def train(engine, steps):
        for step in steps:
            assert engine.train_batch(random_batch(6, seed=step), imitation_objective(), step=step).applied
        return {name: value.detach().clone() for name, value in engine.model.state_dict().items()}

    config = ModelConfig(directory("qwen3"), quantization="nf4", lora_rank=4)
    engine = backend(config)
    before = engine.model.state_dict()
    start = {name: value.clone() for name, value in before.items()}
    train(engine, range(2))
    engine.stage(str(tmp_path), "actor")()
    saved = load_file(tmp_path / "actor/adapter_model.safetensors")
    assert all(".lora_" in name for name in saved)
    expected = train(engine, range(2, 4))
    resumed = backend(saved_model(config, tmp_path / "actor"))
    resumed.restore(str(tmp_path), "actor")
    found = train(resumed, range(2, 4))
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    moved = {name for name, value in expected.items() if not torch.equal(value, start[name])}
    assert moved and all(".lora_" in name for name in moved)


@needs_package
@pytest.mark.parametrize(
    ("method", "targets"),
    [("nf4", "all-linear"), ("nf4", ["q_proj"]), ("nf4", ["lm_head", "q_proj"]), ("int8", ["q_proj"])],
    ids=str,
)
def test_an_export_is_the_model_that_was_trained(directory, tokenizer, tmp_path, method, targets):
    path = directory("qwen3")
    model = packed_policy(path, target_modules=targets, quantization=method)
    with torch.no_grad():
        for one in _adapters(model):
            one.add_(0.05)
    stage_weights(model, Storage(str(tmp_path / "actor")), tokenizer)()
    names = packed_base(tmp_path / "actor")[1]
    assert names == {f"{name}.weight" for name, _ in packed_layers(model)}
    said = []
    export(tmp_path / "actor", tmp_path / "out", report=said.append)
    export(tmp_path / "actor", tmp_path / "narrow", dtype="bfloat16", report=said.append)
    assert method in said[0] and "rounding to bfloat16" in said[1]
    again = load_policy(ModelConfig(str(tmp_path / "out")), device=CPU, seed=0)
    requests = [request("a", prompt(1, 5)), request("b", prompt(2, 9))]
    done = serve(make_engine(model), requests)
    assert log_probs(again, requests, done) == pytest.approx(log_probs(model, requests, done), abs=2e-5)
    unpacked, whole = load_file(tmp_path / "out/model.safetensors"), tiny_model("qwen3").state_dict()
    untouched = "model.layers.0.mlp.up_proj.weight"
    if targets != "all-linear":
        assert torch.equal(unpacked[untouched], rounded(whole[untouched], method))
    export(tmp_path / "actor", tmp_path / "alone", merge=False)
    assert packed_base(tmp_path / "alone") == (method, names)


@needs_package
def test_a_packed_model_is_not_compiled(directory, caplog):
    with caplog.at_level("WARNING"):
        assert compile_layers(packed_policy(directory("gemma3")), CPU, "always") is None
    assert "4 bits" in caplog.text


@needs_package
def test_experts_are_refused(tmp_path):
    model_of(AutoConfig.for_model("qwen3_moe", **{**SIZES, **EXPERTS})).save_pretrained(tmp_path)
    with raises(ModelError, "Qwen3MoeForCausalLM", "model.quantization=none", where="model.quantization"):
        packed_policy(str(tmp_path))


def test_without_the_package_the_message_says_what_to_install(directory, monkeypatch):
    monkeypatch.setattr(four_bits, "find_spec", lambda _: None)
    with raises(ConfigError, install_command("quantization"), where="model.quantization"):
        packed_policy(directory("qwen3"))


def test_a_base_that_was_packed_in_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(json.dumps({"method": "nf4", "block": 128, "weights": ["a.weight"]}))
    with pytest.raises(ModelError, match="blocks of 128"):
        packed_base(tmp_path)
    assert packed_base(tmp_path / "none") == ("none", frozenset())
