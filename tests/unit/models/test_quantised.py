"""Quantised model directories: blocks of 8 and 4 bits are read as float32, all others are refused in one message."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import EXPERTS, SIZES, model_of
from support.messages import raises
from transformers import AutoConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hone.config.model import ModelConfig
from hone.data.model_settings import dequantised_by
from hone.errors import ModelError
from hone.models.loading import load_policy, load_reward_model
from hone.models.streaming import dequantised
from hone.preflight.files import weights
from hone.preflight.plan.model import count_parameters
from hone.training.export import export

CPU = torch.device("cpu")
BLOCK = 8


def quantise(folder, settings, change):
    """Rewrite the weights of a directory tensor by tensor, and name the method in its config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": settings}))
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        tensors |= change(name, value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def in_8_bits(name, value):
    if "proj" not in name or value.dim() != 2:
        return {name: value.bfloat16()}
    scales = value.reshape(value.shape[0] // BLOCK, BLOCK, -1, BLOCK).abs().amax((1, 3)) / 448
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {name: (value / spread).to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}


def in_4_bits(name, value):
    if not name.endswith(("gate_up_proj", "down_proj")):
        return {name: value.bfloat16()}
    experts, width, out = value.shape
    shape = (experts, out, width // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
    return {f"{name}_blocks": blocks, f"{name}_scales": torch.randint(120, 126, shape, dtype=torch.uint8)}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("quantised")
    fp8 = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    wide = {**SIZES, "hidden_size": 64, "intermediate_size": 32, "num_local_experts": 2, "num_experts_per_tok": 1}
    for name, family, sizes, settings, change in (
        ("fp8", "qwen3", SIZES, fp8, in_8_bits),
        ("experts", "qwen3_moe", {**SIZES, **EXPERTS}, fp8, in_8_bits),
        ("mxfp4", "gpt_oss", wide, {"quant_method": "mxfp4"}, in_4_bits),
    ):
        model_of(AutoConfig.for_model(family, **sizes)).save_pretrained(root / name)
        quantise(root / name, settings, change)
    return root


@pytest.mark.parametrize("name", ["fp8", "experts", "mxfp4"])
def test_blocks_are_read_as_transformers_reads_them(directories, name):
    model = load_policy(ModelConfig(str(directories / name)), device=CPU, seed=0)
    loaded, files, compared = model.state_dict(), load_file(directories / name / "model.safetensors"), 0
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    for key, stored in files.items():
        if key.endswith(("_scale_inv", "_scales")):
            continue
        target, expected = key.removesuffix("_blocks"), stored.float()
        if f"{key}_scale_inv" in files:
            expected = Fp8Dequantize(None)._dequantize_one(stored, files[f"{key}_scale_inv"], torch.float32)
        elif key.endswith("_blocks"):
            expected = convert_moe_packed_tensors(stored, files[f"{target}_scales"], dtype=torch.float32)
        if (place := key.split(".experts.")) != [key] and name == "experts":
            number, part, _ = place[1].split(".")
            joint = loaded[f"{place[0]}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(number)]
            got = joint if part == "down_proj" else joint.chunk(2)[part == "up_proj"]
        else:
            got = loaded[target]
        assert torch.equal(got, expected), key
        compared += 1
    assert compared >= len(loaded) - 1


def test_the_last_blocks_of_a_matrix_may_be_smaller():
    """As in DeepSeek-V3, where 576 rows are in blocks of 128."""
    values, scales = torch.randn(10, 7), torch.rand(3, 2)
    expected = torch.tensor([[values[i, j] * scales[i // 4, j // 4] for j in range(7)] for i in range(10)])
    assert torch.equal(dequantised(values, scales, (4, 4)), expected)
    assert torch.equal(dequantised(torch.stack([values] * 2), torch.stack([scales] * 2), (4, 4))[1], expected)


def test_values_without_their_scales_are_refused(directories, tmp_path):
    shutil.copytree(directories / "fp8", tmp_path / "bare")
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    left = {name: value for name, value in tensors.items() if not name.endswith("_scale_inv")}
    save_file(left, tmp_path / "bare" / "model.safetensors", {"format": "pt"})
    with raises(ModelError, "torch.float8_e4m3fn", where="model.path"):
        load_policy(ModelConfig(str(tmp_path / "bare")), device=CPU, seed=0)


def test_a_reward_model_begins_from_quantised_weights(directories):
    model = load_reward_model(ModelConfig(str(directories / "fp8")), device=CPU)
    assert not model.score.weight.any() and {value.dtype for value in model.parameters()} == {torch.float32}


def test_export_writes_plain_weights(directories, tmp_path):
    from support.templates import tokenizer

    tokenizer("qwen2_5").save_pretrained(directories / "mxfp4")
    export(directories / "mxfp4", tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    models = [
        load_policy(ModelConfig(str(path)), device=CPU, seed=0).state_dict()
        for path in (directories / "mxfp4", tmp_path / "plain")
    ]
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_packed_weights_are_counted_as_parameters(directories):
    packed = ModelConfig(str(directories / "mxfp4"))
    model = load_policy(packed, device=CPU, seed=0)
    assert count_parameters(packed) == sum(value.numel() for value in model.parameters())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ("bitsandbytes", "4 bits")),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ("bitsandbytes", "8 bits")),
        ({"quant_method": "gptq", "bits": 4}, ("gptq", "4 bits")),
        ({"quant_method": "awq", "bits": 4}, ("awq", "4 bits")),
        ({"quant_method": "compressed-tensors"}, ("compressed-tensors",)),
        ({"quant_method": "torchao"}, ("torchao",)),
        ({"bits": 3}, ("3 bits",)),
    ],
)
@pytest.mark.parametrize("card", [True, False])
def test_other_methods_are_one_message_with_the_name_of_the_base(tmp_path, settings, says, card):
    model_of(AutoConfig.for_model("qwen3", **SIZES)).save_pretrained(tmp_path)
    quantise(tmp_path, settings, lambda name, value: {name: value})
    if card:
        (tmp_path / "README.md").write_text("---\nbase_model:\n- Qwen/Qwen3-0.6B\n---\n")
    named = ("Qwen/Qwen3-0.6B",) if card else ()
    with raises(ModelError, *says, *named, where="model.path"):
        load_policy(ModelConfig(str(tmp_path)), device=CPU, seed=0)
    (finding,) = weights("model.path", str(tmp_path))
    assert finding.stops and says[0] in finding.error.what


def test_plain_settings_name_no_method():
    assert dequantised_by({}, "") is None
