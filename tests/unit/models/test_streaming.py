"""A model filled from its files one parameter at a time is the model that transformers loads, for every architecture."""

import pytest
import torch
from support.backend_cases import save_model
from support.messages import raises
from transformers import AutoConfig, AutoModelForCausalLM

from hone.config.model import ModelConfig
from hone.errors import ModelError
from hone.models.loading import as_policy, load_empty, load_policy
from hone.models.registry import ARCHITECTURES
from hone.models.streaming import WeightFiles, empty_model, fill, materialise, standing_in

CPU = torch.device("cpu")


@pytest.mark.parametrize("arch", list(ARCHITECTURES))
def test_the_model_is_the_one_that_transformers_loads(arch, tmp_path):
    architecture = ARCHITECTURES.get(arch)
    save_model(tmp_path, architecture.model_type, tie_word_embeddings=architecture.tied)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model = empty_model(AutoModelForCausalLM, AutoConfig.from_pretrained(tmp_path), trust_remote_code=False)
    assert all(parameter.is_meta for parameter in model.parameters())
    files = WeightFiles(tmp_path, model)
    materialise(model, CPU)
    fill(model, files)
    for kind in ("named_parameters", "named_buffers"):
        ours, theirs = dict(getattr(model, kind)()), dict(getattr(expected, kind)())
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            assert torch.equal(ours[name], value), name


def test_buffers_are_computed_by_the_part_that_has_them():
    """Gemma 3n's inner model computes scales that its outer one cannot."""
    sizes = {"vocab_size": 32, "vocab_size_per_layer_input": 32, "hidden_size": 16, "hidden_size_per_layer_input": 4}
    heads = {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "laurel_rank": 4,
    }
    more = {"intermediate_size": 32, "num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
    config = AutoConfig.for_model("gemma3n_text", **sizes, **heads, **more, activation_sparsity_pattern=[0.0, 0.0])
    empty = empty_model(AutoModelForCausalLM, config, trust_remote_code=False)
    built = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    assert built and all(torch.equal(buffer, built[name]) for name, buffer in empty.named_buffers())


def test_files_in_several_shards_are_read(tmp_path):
    save_model(tmp_path / "one", "qwen3", tie_word_embeddings=True)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    whole.save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    model, files = load_empty(AutoModelForCausalLM, ModelConfig(path=str(tmp_path / "many")))
    materialise(model, CPU)
    fill(model, files)
    for name, value in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), value)


def test_adapters_of_an_empty_model_are_those_of_a_loaded_one(tmp_path):
    config = ModelConfig(path=str(save_model(tmp_path, "qwen3")), lora_rank=4)
    loaded = load_policy(config, device=CPU, seed=3)
    model, _ = load_empty(AutoModelForCausalLM, config)
    empty = as_policy(model, config, seed=3, trainable=True)
    ours, theirs = dict(empty.named_parameters()), dict(loaded.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].requires_grad == value.requires_grad
        assert ours[name].is_meta == (".lora_" not in name)
        if ".lora_" in name:
            assert torch.equal(ours[name], value)


def test_stand_ins_take_no_memory_and_leave():
    with torch.device("meta"):
        model = torch.nn.Linear(10**5, 10**5)
    weight = model.weight
    with standing_in(model):
        assert model.weight.device == CPU
        assert model.weight.untyped_storage().nbytes() == 4
    assert model.weight is weight


def test_missing_weights_and_wrong_shapes_are_refused(tmp_path):
    save_model(tmp_path, "llama", tie_word_embeddings=False)
    model, files = load_empty(AutoModelForCausalLM, ModelConfig(path=str(tmp_path)))
    materialise(model, CPU)
    files._sources.pop("lm_head.weight")
    with raises(ModelError, 1, "lm_head.weight"):
        fill(model, files)
    wider, files = load_empty(
        AutoModelForCausalLM, ModelConfig(path=str(tmp_path), override_config={"intermediate_size": 64})
    )
    materialise(wider, CPU)
    with raises(ModelError, "[32, 48]", "[32, 64]"):
        fill(wider, files)
    (tmp_path / "model.safetensors").rename(tmp_path / "other.safetensors")
    with raises(ModelError, "model.safetensors"):
        load_empty(AutoModelForCausalLM, ModelConfig(path=str(tmp_path)))
