"""A staged model is what transformers or PEFT would have saved, tensor for tensor, whatever its kind."""

import json
import uuid

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from support.models import tiny_model
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3ForTokenClassification,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.tensor_files import TensorSpec
from hone.training.checkpoints.weights import FileLayout, stage_weights

SMALL = {
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def models():
    torch.manual_seed(0)
    yield "qwen3", Qwen3ForCausalLM(Qwen3Config(**SMALL))
    yield "tied", Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True))
    yield "values", Qwen3ForTokenClassification(Qwen3Config(**SMALL, num_labels=1))
    yield "experts", Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS))
    yield "gpt-oss", GptOssForCausalLM(GptOssConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2))
    yield "bfloat16", Qwen3ForCausalLM(Qwen3Config(**SMALL)).to(torch.bfloat16)


def tensors(directory):
    return {name: value for file in sorted(directory.glob("*.safetensors")) for name, value in load_file(file).items()}


@pytest.mark.parametrize("name", ["qwen3", "tied", "values", "experts", "gpt-oss", "bfloat16"])
def test_a_staged_model_is_what_transformers_saves(name, tmp_path):
    model = dict(models())[name]
    model.save_pretrained(tmp_path / "theirs")
    stage_weights(model, Storage(tmp_path / "ours"))()
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype
        assert torch.equal(ours[key], value), key
    assert {f.name for f in (tmp_path / "ours").iterdir()} == {f.name for f in (tmp_path / "theirs").iterdir()}
    for file in (tmp_path / "theirs").glob("*.json"):
        assert json.loads((tmp_path / "ours" / file.name).read_text()) == json.loads(file.read_text())


def test_large_models_are_cut_into_files_with_an_index(tmp_path):
    model = tiny_model()
    stage_weights(model, Storage(tmp_path), largest_file=20_000)()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert all(file.stat().st_size < 25_000 for file in files)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_adapters_are_what_peft_saves(tmp_path):
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    model.save_pretrained(str(tmp_path / "theirs"))
    stage_weights(model, Storage(tmp_path / "ours"))()
    ours, theirs = tensors(tmp_path / "ours"), tensors(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], value) for key, value in theirs.items())
    settings = [json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("ours", "theirs")]
    assert settings[0] | {"target_modules": []} == settings[1] | {"target_modules": []}
    assert set(settings[0]["target_modules"]) == set(settings[1]["target_modules"])
    PeftModel.from_pretrained(tiny_model(), tmp_path / "ours")


def test_staged_state_does_not_change_during_training(tmp_path):
    model = tiny_model()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    write = stage_weights(model, Storage(tmp_path))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    write()
    saved = tensors(tmp_path)
    assert all(torch.equal(saved[name], value) for name, value in before.items())


def test_straight_into_an_object_store(tmp_path):
    bucket = Storage(f"memory://{uuid.uuid4().hex}/actor")
    model = tiny_model()
    stage_weights(model, bucket, largest_file=50_000)()
    bucket.fetch(tmp_path / "local")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "local")
    for (name, ours), (_, theirs) in zip(loaded.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 5), st.integers(1, 100))
def test_every_tensor_goes_into_one_file_of_one_rank(lengths, ranks, largest):
    specs = {f"t{i}": TensorSpec(torch.uint8, (length,)) for i, length in enumerate(lengths)}
    layout = FileLayout("model", ranks, largest)
    owners = {name: layout.add(name, spec) for name, spec in specs.items()}
    files = {file: (rank, held) for rank in range(ranks) for file, held in layout.files_of(rank).items()}
    assert {name: rank for rank, held in files.values() for name in held} == owners
    assert sum(len(held) for _, held in files.values()) == len(specs)
    assert all(len(held) == 1 or sum(spec.size for spec in held.values()) <= largest for _, held in files.values())
    loads = [sum(specs[name].size for name, owner in owners.items() if owner == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(lengths, default=0)
    if len(files) > 1:
        held = {name: file for file, (_, specs) in files.items() for name in specs}
        assert layout.index()["weight_map"] == held
