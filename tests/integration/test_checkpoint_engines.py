"""A run goes on from a checkpoint with another layout as it would have gone on with its own."""

import dataclasses
from pathlib import Path

import pytest
import torch
from support.backend_cases import Case, save_model
from support.checkpoint_cases import same_tensors
from support.checkpoint_engines import go_on, resume, train_and_save
from support.ranks import Ranks
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.long("hone/training/checkpoints", "hone/training/backends")

LAYOUTS = {
    "one": None,
    "fsdp": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "hybrid": {"fsdp_config": {"fsdp_size": 1}},
    "experts": {"expert_parallel_size": 2},
    "offloaded": {"fsdp_config": {"param_offload": True, "optimizer_offload": True}},
}


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {arch: save_model(root / arch, arch) for arch in ("qwen3", "qwen3_moe")}


def run(two, function, case: Case, layout: str, *args):
    """On one process, or on two; what rank 0 returns."""
    if LAYOUTS[layout] is None:
        return function(case, *args)
    answers = two.run(function, dataclasses.replace(case, parallel=LAYOUTS[layout]), *args)
    for answer in answers[1:]:
        same_tensors(answer, answers[0])
    return answers[0]


PAIRS = [
    ("qwen3", "fsdp", "one"),
    ("qwen3", "one", "fsdp"),
    ("qwen3", "fsdp", "tensor"),
    ("qwen3", "tensor", "one"),
    ("qwen3", "hybrid", "offloaded"),
    ("qwen3_moe", "experts", "one"),
    ("qwen3_moe", "one", "experts"),
    ("qwen3_moe", "fsdp", "experts"),
]


@pytest.mark.parametrize(("arch", "before", "after"), PAIRS)
def test_weights_and_optimizer_state_arrive_bit_for_bit(two, models, tmp_path, arch, before, after):
    case = Case(models[arch], updates=2)
    saved = run(two, train_and_save, case, before, tmp_path)
    assert any(name.startswith("exp_avg/") for name in saved)
    same_tensors(run(two, resume, case, after, tmp_path), saved)


@pytest.mark.parametrize(
    ("arch", "before", "after"), [PAIRS[2], PAIRS[3], PAIRS[4], PAIRS[5], PAIRS[6]], ids=lambda value: str(value)
)
def test_muon_and_an_average_of_the_weights_arrive(two, models, tmp_path, arch, before, after):
    case = Case(models[arch], updates=2, optim={"optimizer": "Muon", "ema_decay": 0.7})
    saved = run(two, train_and_save, case, before, tmp_path)
    assert {name.partition("/")[0] for name in saved if "/" in name} >= {"momentum_buffer", "exp_avg", "ema"}
    same_tensors(run(two, resume, case, after, tmp_path), saved)
    averages = {name.removeprefix("ema/"): value for name, value in saved.items() if name.startswith("ema/")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "actor_ema", dtype=torch.float32)
    same_tensors(dict(model.named_parameters()), averages)


def test_an_adapter_arrives_too(two, models, tmp_path):
    case = Case(models["qwen3"], updates=2, model_settings={"lora_rank": 2})
    saved = run(two, train_and_save, case, "fsdp", tmp_path)
    same_tensors(run(two, resume, case, "one", tmp_path), saved)


@pytest.mark.parametrize("after", ["one", "fsdp", "tensor"])
def test_the_next_updates_are_those_of_the_undisturbed_run(two, models, tmp_path, after):
    """Two updates on two ranks, then two on another layout: as four in one process, within float32's reduction error."""
    case = Case(models["qwen3"], updates=2)
    run(two, train_and_save, case, "fsdp", tmp_path)
    found = run(two, go_on, case, after, tmp_path)
    expected = train_and_save(dataclasses.replace(case, updates=4), tmp_path / "undisturbed")
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5, msg=name)
