"""Loading: weights of one's own, adapters that begin at zero and can be switched off, value models that begin at zero."""

import json
from typing import Any

import pytest
import torch
from support.messages import raises
from support.models import random_batch, tiny_model

from hone.config.model import ModelConfig, OptimConfig
from hone.errors import ModelError
from hone.models.heads import PolicyHead, ValueHead
from hone.models.llama.spec import supports
from hone.models.loading import (
    adapter_off,
    as_policy,
    as_reward_model,
    causal_lm,
    load_policy,
    load_value_model,
    narrow_frozen_matrices,
    reward_factory,
    saved_model,
)
from hone.training.backends.local import LocalBackend
from hone.training.engine import TrainSettings
from hone.training.objectives import imitation_objective

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def directory(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param).save_pretrained(path)
    return path


def engine_of(model, head=None) -> LocalBackend:
    return LocalBackend(model, head or PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=1e-2)))


def log_probs(model, batch) -> torch.Tensor:
    return LocalBackend(model, PolicyHead(), TrainSettings(CPU)).infer_batch(batch)["log_probs"].values


def through_module(model):
    """The model with a hook that does nothing: it is then computed by its own module, as one with adapters is."""
    model.register_forward_hook(lambda *_: None)
    return model


def test_weights_lie_in_aligned_memory_of_their_own(directory):
    for model in (load_policy(ModelConfig(str(directory)), device=CPU, seed=0),
                  load_value_model(ModelConfig(str(directory)), device=CPU)):  # fmt: skip
        assert {parameter.data_ptr() % 64 for parameter in model.parameters()} == {0}
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_adapter_begins_as_nothing_and_off_it_is_the_base_model(directory):
    batch = random_batch(6, seed=1)
    config = ModelConfig(str(directory), lora_rank=4)
    expected = log_probs(through_module(load_policy(ModelConfig(str(directory)), device=CPU, seed=0)), batch)
    model = load_policy(config, device=CPU, seed=3)
    assert torch.equal(log_probs(model, batch), expected)
    engine = engine_of(model)
    frozen = {name: value.clone() for name, value in model.named_parameters() if not value.requires_grad}
    assert engine.train_batch(batch, imitation_objective(), step=0).applied
    assert (log_probs(model, batch) - expected).abs().max() > 1e-3
    with adapter_off(model):
        assert torch.equal(log_probs(model, batch), expected)
    assert (log_probs(model, batch) - expected).abs().max() > 1e-3, "and on again"
    assert all(torch.equal(value, frozen[name]) for name, value in model.named_parameters() if name in frozen)
    with pytest.raises(TypeError, match="no adapter"), adapter_off(tiny_model()):
        pass


def test_fresh_adapters_depend_on_the_seed_alone(directory):
    def adapter(seed: int) -> torch.Tensor:
        torch.manual_seed(torch.randint(1000, ()).item())
        model = load_policy(ModelConfig(str(directory), lora_rank=4), device=CPU, seed=seed)
        return torch.cat([value.flatten() for name, value in model.named_parameters() if "lora_A" in name])

    assert torch.equal(adapter(1), adapter(1))
    assert not torch.equal(adapter(1), adapter(2))


@pytest.mark.parametrize("rank", [0, 4])
def test_a_saved_model_is_the_same_model(directory, tmp_path, rank):
    batch, config = random_batch(6, seed=2), ModelConfig(str(directory), lora_rank=rank)
    engine = engine_of(load_policy(config, device=CPU, seed=0))
    engine.train_batch(batch, imitation_objective(), step=0)
    engine.stage(str(tmp_path), "actor")()
    again = load_policy(saved_model(config, tmp_path / "actor"), device=CPU, seed=9)
    assert torch.equal(log_probs(again, batch), log_probs(engine.model, batch))
    trainable = [name for name, value in engine.model.named_parameters() if value.requires_grad]
    assert trainable == [name for name, value in again.named_parameters() if value.requires_grad]


def test_a_value_model_begins_at_zero_and_a_saved_one_where_it_was(directory, tmp_path):
    batch = random_batch(6, seed=3)
    engine = engine_of(load_value_model(ModelConfig(str(directory)), device=CPU), ValueHead())
    assert (engine.infer_batch(batch)["values"].values == 0).all()

    def fit(outputs, micro, totals):
        return ((outputs["values"].values - 1) ** 2).mean(), {}

    engine.train_batch(batch, fit, step=0)
    values = engine.infer_batch(batch)["values"].values
    assert (values != 0).any()
    engine.stage(str(tmp_path), "critic")()
    again = engine_of(load_value_model(ModelConfig(str(tmp_path / "critic")), device=CPU), ValueHead())
    assert torch.equal(again.infer_batch(batch)["values"].values, values)


def test_override_config_acts_and_its_typing_errors_are_detected(directory):
    model = load_policy(ModelConfig(str(directory), override_config={"num_hidden_layers": 1}), device=CPU, seed=0)
    assert len(model.model.layers) == 1
    with raises(ModelError, "atention_dropout", "attention_dropout"):
        load_policy(ModelConfig(str(directory), override_config={"atention_dropout": 0.1}), device=CPU, seed=0)


@pytest.mark.filterwarnings("error::FutureWarning", "ignore:.is_gradient_checkpointing")  # PEFT reads it
@pytest.mark.parametrize("rank", [0, 4])
def test_gradient_checkpointing_keeps_the_fused_layers_of_a_model(directory, rank):
    def updated(checkpointing: bool) -> tuple[bool, torch.Tensor]:
        config = ModelConfig(str(directory), lora_rank=rank, enable_gradient_checkpointing=checkpointing)
        model = load_policy(config, device=CPU, seed=0)
        engine_of(model).train_batch(batch, imitation_objective(), step=0)
        return supports(causal_lm(model)), log_probs(model, batch)

    batch = random_batch(6, seed=4)
    (plain, without), (fits, with_it) = updated(False), updated(True)
    assert fits == plain == (rank == 0), "generation and training compute it in few operations"
    assert torch.equal(with_it, without)


def test_directories_without_a_model_are_refused(directory, tmp_path):
    with raises(ModelError, tmp_path, "config.json"):
        load_policy(ModelConfig(str(tmp_path)), device=CPU, seed=0)
    with raises(ModelError, tmp_path):
        load_policy(ModelConfig(str(directory), lora_adapter_path=str(tmp_path)), device=CPU, seed=0)
    with raises(ModelError, "nothing"):
        load_policy(ModelConfig(str(directory), lora_rank=4, target_modules=["nothing"]), device=CPU, seed=0)
    from safetensors.torch import load_file, save_file

    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with raises(ModelError, 1, "model.layers.1.mlp.up_proj.weight"):
        load_policy(ModelConfig(str(tmp_path)), device=CPU, seed=0)


@pytest.mark.parametrize(
    "more", [{"use_dora": True}, {"bias": "all"}, {"lora_bias": True}, {"peft_type": "IA3"}, {"peft_type": None}]
)
def test_adapters_that_engines_would_not_get_whole_are_refused(directory, tmp_path, more):
    policy = load_policy(ModelConfig(str(directory), lora_rank=4, lora_alpha=8), device=CPU, seed=0)
    policy.save_pretrained(tmp_path)
    load_policy(ModelConfig(str(directory), lora_adapter_path=str(tmp_path)), device=CPU, seed=0)
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | more))
    with raises(
        ModelError, tmp_path, *(name for name, value in more.items() if value), where="model.lora_adapter_path"
    ):
        load_policy(ModelConfig(str(directory), lora_adapter_path=str(tmp_path)), device=CPU, seed=0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rank", [0, 4])
def test_frozen_matrices_in_bfloat16_change_no_number(tied: bool, rank: int) -> None:
    """What autocast would round anyway, in half the memory; trained, tied and other weights stay float32."""
    outcomes, dtypes = [], []
    for narrow in (False, True):
        model: Any = tiny_model()
        model.lm_head.weight = model.get_input_embeddings().weight if tied else model.lm_head.weight
        config = ModelConfig(path="x", lora_rank=rank)
        ready = as_policy(model, config, seed=1, trainable=rank > 0)
        if narrow:
            narrow_frozen_matrices(ready, torch.device("cuda"), "bfloat16")
        optim = OptimConfig(lr=0.1, optimizer="SGD") if rank else None
        engine = LocalBackend(ready, PolicyHead(), TrainSettings(CPU, optim=optim, dtype="bfloat16"))
        if rank:
            engine.train_batch(random_batch(6, seed=0), imitation_objective(), step=0)
        outcomes.append(engine.infer_batch(random_batch(6, seed=1))["log_probs"].values)
        dtypes.append({name: parameter.dtype for name, parameter in ready.named_parameters()})
    assert torch.equal(outcomes[0], outcomes[1])
    assert set(dtypes[0].values()) == {torch.float32}
    narrowed = {name for name, dtype in dtypes[1].items() if dtype == torch.bfloat16}
    matrices = {name for name in dtypes[1] if "_proj" in name and "lora_" not in name}
    heads = {name for name in dtypes[1] if "lm_head" in name}
    assert len(matrices) == 14 and narrowed == matrices | (set() if tied else heads)


def test_nothing_is_narrowed_on_a_cpu_or_in_float32() -> None:
    model = as_policy(tiny_model(), ModelConfig(path="x"), seed=1, trainable=False)
    narrow_frozen_matrices(model, CPU, "bfloat16")
    narrow_frozen_matrices(model, torch.device("cuda"), "float32")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_an_adapter_of_another_task_is_refused_with_the_way_on(directory, tmp_path):
    load_policy(ModelConfig(str(directory), lora_rank=4), device=CPU, seed=0).save_pretrained(tmp_path)
    config = ModelConfig(str(directory), lora_adapter_path=str(tmp_path))
    wanted = ("CAUSAL_LM", "SEQ_CLS", f"hone export {tmp_path} --out DIR")
    with raises(ModelError, *wanted, where="model.lora_adapter_path"):
        as_reward_model(tiny_model(), reward_factory(config), config, seed=0, trainable=True)
