"""Dropout: off in every model that is trained, so that the trainer's log-probs are the engine's; on in fine-tuning with the key."""

import shutil

import pytest
import torch
from support.families import SIZES, model_of, serve
from support.families import make_engine as engine_for
from support.family_suite import prompt, ragged, request
from support.messages import raises
from support.models import random_batch
from support.small_sft import make_small_sft, small_sft_settings
from support.world import metrics
from transformers import AutoConfig

from hone.config import SFTConfig, load_config
from hone.config.model import ModelConfig, OptimConfig, SFTModelConfig
from hone.data.batch import Batch
from hone.errors import ModelError
from hone.models.heads import PolicyHead
from hone.models.loading import load_policy, load_reward_model, load_value_model, prepare
from hone.trainers import sft
from hone.training.backends.local import LocalBackend
from hone.training.engine import Outputs, TrainSettings
from hone.training.objectives import imitation_objective

CPU = torch.device("cpu")
FAMILIES = ["gpt2", "seed_oss"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("dropping")
    for family in FAMILIES:
        sizes = SIZES if family != "gpt2" else {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4}
        model_of(AutoConfig.for_model(family, **sizes)).save_pretrained(root / family)
    return root


def trained_log_probs(model, batch: Batch) -> torch.Tensor:
    """Log-probs that the forward pass of an update computes."""
    seen = Outputs(batch.ragged("response_ids"))
    backend = LocalBackend(model, PolicyHead(), TrainSettings(CPU, optim=OptimConfig(lr=0.0)))
    backend.train_batch(batch, imitation_objective(), step=0, outputs_seen=seen)
    return seen.columns()["log_probs"].values


@pytest.mark.parametrize("family", FAMILIES)
def test_an_update_sees_the_log_probs_of_the_engine(directories, family, caplog):
    model = load_policy(ModelConfig(str(directories / family)), device=CPU, seed=0)
    requests = [request(f"r{n}", prompt(n, 3 + n)) for n in range(4)]
    done = [serve(engine_for(model), requests)[one.request_id] for one in requests]
    responses = ragged([one.token_ids for one in done])
    mask = responses.with_values(torch.ones_like(responses.values))
    prompts = ragged([one.prompt_ids for one in requests])
    batch = Batch({"prompt_ids": prompts, "response_ids": responses, "response_mask": mask})
    with caplog.at_level("INFO", "hone"):
        trained = trained_log_probs(model, batch)
    sampled = torch.tensor([value for one in done for value in one.log_probs])
    torch.testing.assert_close(trained, sampled, atol=1e-5, rtol=0)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "hone.models.dropout"]
    assert ("resid_pdrop=0.1" if family == "gpt2" else "residual_dropout=0.1") in said


@pytest.mark.parametrize("load", [load_policy, load_reward_model])
def test_dropout_of_an_adapter_is_off_too(directories, load, tmp_path):
    path = str(directories / "seed_oss")
    first = load(ModelConfig(path, lora_rank=2), device=CPU, seed=0)
    first.peft_config["default"].lora_dropout = 0.5
    first.save_pretrained(tmp_path)
    model = load(ModelConfig(path, lora_adapter_path=str(tmp_path)), device=CPU, seed=0)
    drawn = {name: module.p for name, module in model.named_modules() if isinstance(module, torch.nn.Dropout)}
    assert set(drawn.values()) == {0.0} and any("lora_dropout" in name for name in drawn)


def test_a_value_model_has_none(directories):
    model = load_value_model(ModelConfig(str(directories / "gpt2")), device=CPU).train()
    assert {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)} == {0.0}


@pytest.mark.parametrize("family", [*FAMILIES, "llama"])
def test_fine_tuning_has_it_with_the_key(directories, family):
    if family == "llama":
        model_of(AutoConfig.for_model(family, **SIZES, attention_dropout=0.1)).save_pretrained(directories / family)
    batch, given = random_batch(6, seed=1), {}
    for on in (False, True):
        model = load_policy(SFTModelConfig(str(directories / family), dropout=on), device=CPU, seed=0)
        given[on] = [trained_log_probs(model, batch) for _ in range(2)]
    torch.testing.assert_close(*given[False], atol=0, rtol=0)
    assert all((drawn - given[False][0]).abs().max() > 1e-3 for drawn in given[True])
    assert (given[True][0] - given[True][1]).abs().max() > 1e-3


def test_the_key_without_any_dropout_is_an_error():
    model = model_of(AutoConfig.for_model("qwen3", **SIZES))
    with raises(ModelError, "model.dropout=false", where="model.dropout"):
        prepare(model, SFTModelConfig(dropout=True))
    prepare(model, SFTModelConfig(dropout=True), trainable=False)


def test_a_resumed_run_draws_the_same(tmp_path):
    make_small_sft(tmp_path)

    def run(name: str, steps: int) -> None:
        overrides = small_sft_settings(
            tmp_path,
            tmp_path / name,
            f"trainer.total_training_steps={steps}",
            "model.dropout=true",
            "model.override_config={attention_dropout: 0.2}",
        )
        assert sft.train(load_config(SFTConfig, overrides=overrides)) == 0

    run("whole", 3)
    run("parts", 1)
    run("parts", 3)
    losses = [[row.get("train/loss") for row in metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) >= 3
    for name in ("whole", "parts"):
        shutil.copy(tmp_path / name / "checkpoints/step_3/actor/model.safetensors", tmp_path / f"{name}.safetensors")
    assert (tmp_path / "whole.safetensors").read_bytes() == (tmp_path / "parts.safetensors").read_bytes()
