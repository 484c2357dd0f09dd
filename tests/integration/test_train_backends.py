"""The training backends that Hone brings, in the conformance suite; and what only a divided model can show."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from support import backend_checks as checks
from support.backend_cases import (
    Case,
    dtypes,
    held,
    train,
    train_with_compiled_layers,
    train_with_fused_layers,
    train_with_prefetch,
)
from support.plain_training import alone
from support.ranks import Ranks
from support.train_backend_suite import LORA, STEADY, TrainBackendConformance, Ways, assert_trains_as_one, close

long = pytest.mark.long(
    "hone/training/backends", "hone/training/engine.py", "hone/training/microbatches.py", "hone/models/attention"
)

TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {"ulysses_sequence_parallel_size": 2}
RING = {"context_parallel_size": 2}
EXPERT = {"expert_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}


def fsdp(**settings: Any) -> dict[str, Any]:
    return {"fsdp_config": settings}


class TestLocal(TrainBackendConformance):
    strategy = "local"
    layouts = {"one process": Ways()}


class TestFsdp2(TrainBackendConformance):
    strategy = "fsdp2"
    layouts = {
        "fsdp": Ways(2),
        "kept after forward": Ways(2, fsdp(reshard_after_forward=False)),
        "two copies": Ways(2, fsdp(fsdp_size=1)),
        "everything offloaded": Ways(2, fsdp(offload_policy=True)),
        "offloaded while at rest": Ways(2, fsdp(param_offload=True, optimizer_offload=True)),
        "tensor": Ways(2, TENSOR),
        "sequence": Ways(2, SEQUENCE),
        "pipeline": Ways(2, PIPELINE),
        "ring": Ways(2, RING),
    }


CHECKPOINTING = {"enable_gradient_checkpointing": True}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor, untied": ("untied", {"parallel": TENSOR}),
    "tensor, vocabulary that does not divide": ("odd", {"parallel": TENSOR}),
    "tensor, a plan that gathers": ("olmo", {"parallel": TENSOR}),
    "tensor, experts whole": ("experts", {"parallel": TENSOR}),
    "sequence, sinks and windows": ("gpt_oss", {"parallel": SEQUENCE}),
    "ring, sinks and windows": ("gpt_oss", {"parallel": RING}),
    "fsdp, experts": ("experts", {}),
    "expert": ("experts", {"parallel": EXPERT}),
    "expert, biases": ("gpt_oss", {"parallel": EXPERT}),
    "pipeline, untied": ("untied", {"parallel": PIPELINE}),
    "pipeline, biases": ("qwen2", {"parallel": PIPELINE}),
    "pipeline, norms after the layer": ("olmo", {"parallel": PIPELINE}),
    "pipeline, experts": ("experts", {"parallel": PIPELINE}),
    "pipeline, sinks and windows": ("gpt_oss", {"parallel": PIPELINE}),
    "pipeline, tokens from supports": ("tied", {"restricted": True, "parallel": PIPELINE, "optim": STEADY}),
    "pipeline, everything offloaded": ("tied", {"parallel": PIPELINE | fsdp(offload_policy=True)}),
    "pipeline, offloaded while at rest": (
        "tied",
        {"parallel": PIPELINE | fsdp(param_offload=True, optimizer_offload=True)},
    ),
    "sequence, tokens from supports": ("tied", {"restricted": True, "parallel": SEQUENCE, "optim": STEADY}),
    "tensor, tokens from supports": ("tied", {"restricted": True, "parallel": TENSOR, "optim": STEADY}),
    "fsdp, experts of the engine": ("experts", {"replayed": True}),
    "tensor, experts of the engine": ("experts", {"replayed": True, "parallel": TENSOR}),
    "sequence, experts of the engine": ("experts", {"replayed": True, "parallel": SEQUENCE, "trees": True}),
    "ring, tokens from supports": ("tied", {"restricted": True, "parallel": RING, "optim": STEADY}),
    "ring, experts of the engine": ("experts", {"replayed": True, "parallel": RING, "trees": True}),
    "ring, three heads": ("three heads", {"parallel": RING, "trees": True, "optim": STEADY}),
    "expert, experts of the engine": ("gpt_oss", {"replayed": True, "parallel": EXPERT}),
    "fsdp, a bias of the router": ("biased router", {}),
    "expert, a bias of the router": ("biased router", {"parallel": EXPERT}),
    "fsdp, gated delta nets": ("qwen3_5_moe_text", {}),
    "fsdp, Mamba 2 beside attention": ("falcon_h1", {"optim": STEADY}),
    "fsdp, Mamba 2 alone, gradient checkpointing": ("mamba2", {"model_settings": CHECKPOINTING}),
    "fsdp, layers of Mamba, gradient checkpointing": ("jamba", {"model_settings": CHECKPOINTING}),
    "fsdp, lightning attention, gradient checkpointing": ("minimax", {"model_settings": CHECKPOINTING}),
    "fsdp, adapter of gated delta nets": ("qwen3_5_moe_text", {"model_settings": LORA, "optim": STEADY}),
    "experts of the engine, gradient checkpointing": (
        "experts",
        {"replayed": True, "model_settings": CHECKPOINTING},
    ),
    "fsdp, balance loss": ("experts", {"balance": 0.5, "trees": True, "model_settings": CHECKPOINTING}),
    "tensor, balance loss": ("experts", {"balance": 0.5, "parallel": TENSOR}),
    "sequence, balance loss": ("experts", {"balance": 0.5, "parallel": SEQUENCE, "replayed": True}),
    "ring, balance loss": ("gpt_oss", {"balance": 0.5, "parallel": RING, "model_settings": CHECKPOINTING}),
    "expert, balance loss": ("experts", {"balance": 0.5, "parallel": EXPERT}),
    "expert, gradient checkpointing": ("experts", {"parallel": EXPERT, "model_settings": CHECKPOINTING}),
}


@pytest.mark.parametrize("model", ["experts", "gpt_oss"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_process_follows_the_experts_of_the_engine(model: str, checkpointing: bool, tiny_models) -> None:
    settings = {"enable_gradient_checkpointing": checkpointing}
    case = Case(
        tiny_models[model],
        parallel={"strategy": "local"},
        replayed=True,
        trees=True,
        model_settings=settings,
        optim=STEADY,
    )
    assert_trains_as_one(lambda function, *args: [function(*args)], case)
    free = dataclasses.replace(case, replayed=False, updates=0)
    assert not torch.allclose(
        alone(free).columns["log_probs"], alone(dataclasses.replace(free, replayed=True)).columns["log_probs"]
    )


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("experts", {"budget": 8}),
        ("gpt_oss", {"budget": 1000, "trees": True, "loss_agg_mode": "seq-mean-token-sum"}),
        ("experts", {"trees": True, "replayed": True, "model_settings": CHECKPOINTING}),
        ("biased router", {}),
    ],
)
def test_one_process_trains_the_balance_loss_of_single_sequences(model: str, changes: Any, tiny_models) -> None:
    """In micro-batches of one row and of all, of softmax and sigmoid routers, with experts of the engine and recomputed layers."""
    case = Case(tiny_models[model], parallel={"strategy": "local"}, balance=0.5, optim=STEADY, updates=2, **changes)
    assert_trains_as_one(lambda function, *args: [function(*args)], case)
    plain = alone(dataclasses.replace(case, balance=0.0)).norms
    assert any(abs(norm - without) > 1e-3 for norm, without in zip(alone(case).norms, plain, strict=True))


@long
@pytest.mark.parametrize("what", ARCHITECTURES)
def test_two_ranks_train_any_architecture_as_one(what: str, two_ranks: Ranks, tiny_models) -> None:
    model, changes = ARCHITECTURES[what]
    assert_trains_as_one(two_ranks.run, Case(tiny_models[model], **changes))


MUON = {"optim": {"optimizer": "Muon"}}


@long
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("experts", {}),
        ("experts", {"parallel": EXPERT}),
        ("odd", {"parallel": TENSOR}),
        ("gpt_oss", {"parallel": EXPERT}),
    ],
)
def test_two_ranks_orthogonalise_as_one(model: str, changes: dict[str, Any], two_ranks: Ranks, tiny_models) -> None:
    assert_trains_as_one(two_ranks.run, Case(tiny_models[model], **changes, **MUON))


@long
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tied", MUON),
        ("tied", MUON | {"parallel": TENSOR}),
        ("experts", MUON | {"parallel": EXPERT}),
        ("experts", MUON | {"parallel": EXPERT | TENSOR}),
        ("tied", {}),
        ("tied", {"parallel": fsdp(fsdp_size=2)}),
        ("tied", {"parallel": TENSOR}),
        ("tied", {"parallel": SEQUENCE}),
        ("tied", {"parallel": TENSOR | SEQUENCE}),
        ("tied", {"parallel": PIPELINE}),
        ("tied", {"parallel": PIPELINE | TENSOR}),
        ("tied", {"parallel": PIPELINE | TENSOR, "model_settings": LORA, "optim": STEADY}),
        ("tied", {"parallel": PIPELINE | SEQUENCE, "kind": "value"}),
        ("tied", {"parallel": PIPELINE | RING}),
        ("experts", {"parallel": PIPELINE | EXPERT}),
        ("deep", {"parallel": {"pipeline_model_parallel_size": 4}}),
        ("tied", {"parallel": TENSOR, "model_settings": LORA, "optim": STEADY}),
        ("tied", {"parallel": TENSOR | fsdp(fsdp_size=1), "kind": "value"}),
        ("experts", {"parallel": EXPERT}),
        ("experts", {"parallel": EXPERT | fsdp(fsdp_size=2)}),
        ("experts", {"parallel": EXPERT | SEQUENCE}),
        ("experts", {"parallel": EXPERT | TENSOR}),
        ("experts", {"parallel": {"expert_parallel_size": 4}}),
        ("untied", {"parallel": {"ulysses_sequence_parallel_size": 4}}),  # more ranks than key-value heads
        ("tied", {"parallel": RING, "trees": True, "optim": STEADY}),
        ("tied", {"parallel": RING | SEQUENCE, "trees": True, "optim": STEADY}),
        ("tied", {"parallel": RING | TENSOR}),
        ("tied", {"parallel": RING | TENSOR, "model_settings": LORA, "optim": STEADY}),
        ("tied", {"parallel": RING | SEQUENCE, "kind": "value"}),
        ("gpt_oss", {"parallel": RING | SEQUENCE}),
        ("experts", {"parallel": RING | EXPERT}),
        ("three heads", {"parallel": {"context_parallel_size": 4}, "trees": True, "optim": STEADY}),
    ],
)
def test_four_ranks_in_two_dimensions(model: str, changes: dict[str, Any], four_ranks: Ranks, tiny_models) -> None:
    assert_trains_as_one(four_ranks.run, Case(tiny_models[model], **changes))


@long
@pytest.mark.parametrize(("before", "after"), [(RING, {}), (TENSOR, RING), (RING, SEQUENCE)])
def test_a_training_is_resumed_with_another_layout(
    before: dict[str, Any], after: dict[str, Any], two_ranks: Ranks, tiny_models, tmp_path
) -> None:
    case = Case(tiny_models["untied"], updates=2, optim=STEADY)
    expected, later = checks.uninterrupted(dataclasses.replace(case, parallel={"strategy": "local"}))
    two_ranks.run(checks.saved, dataclasses.replace(case, parallel=before), tmp_path)
    for weights, losses in two_ranks.run(checks.resumed, dataclasses.replace(case, parallel=after), tmp_path):
        close(losses, later)
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            close(weights[name], value, name=name)


@long
def test_each_rank_holds_its_part_only(two_ranks: Ranks, tiny_models) -> None:
    whole = held(Case(tiny_models["experts"]))
    for parallel in ({}, EXPERT):
        parts = two_ranks.run(held, Case(tiny_models["experts"], parallel=parallel))
        assert sum(parts) == whole
        assert max(parts) < 0.51 * whole


@long
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_parameters_may_be_gathered_in_a_narrow_dtype(dtype: str, two_ranks: Ranks, tiny_models) -> None:
    case = Case(tiny_models["tied"], parallel=fsdp(mixed_precision={"param_dtype": dtype}))
    expected = alone(dataclasses.replace(case, updates=1))
    for outcome, shards in two_ranks.run(dtypes, case):
        assert shards == {torch.float32}
        assert outcome.losses != pytest.approx(expected.losses, abs=1e-5)  # rounded, so it did happen
        assert outcome.losses == pytest.approx(expected.losses, abs=0.1)
        assert outcome.norms == pytest.approx(expected.norms, rel=0.1)


@long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_early_gathering_changes_no_number(checkpointing: bool, two_ranks: Ranks, tiny_models) -> None:
    case = Case(tiny_models["tied"], model_settings={"enable_gradient_checkpointing": checkpointing})
    expected = two_ranks.run(train, case)
    for outcome, other in zip(two_ranks.run(train_with_prefetch, case), expected, strict=True):
        assert (outcome.losses, outcome.norms) == (other.losses, other.norms)
        assert all(torch.equal(value, other.weights[name]) for name, value in outcome.weights.items())


@pytest.mark.parametrize("kept", [None, "nothing", "attention"])
def test_fused_layers_of_sharded_models_train_as_one_process(kept: str | None, two_ranks: Ranks, tiny_models) -> None:
    """Also under gradient checkpointing, whose backward pass computes a layer from parameters that FSDP gathered again."""
    settings = {} if kept is None else {"enable_gradient_checkpointing": True, "gradient_checkpointing_keeps": kept}
    case = Case(tiny_models["tied"], model_settings=settings)
    expected = alone(case)
    for outcome in two_ranks.run(train_with_fused_layers, case):
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-5)
        for name, value in outcome.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=1e-4, atol=1e-6)


def test_fused_layers_in_bfloat16_stay_near_float32(two_ranks: Ranks, tiny_models) -> None:
    narrow = {"fsdp_config": {"mixed_precision": {"param_dtype": "bfloat16"}}}
    expected = alone(Case(tiny_models["tied"]))
    plain = two_ranks.run(train, Case(tiny_models["tied"], parallel=narrow))[0]
    fused = two_ranks.run(train_with_fused_layers, Case(tiny_models["tied"], parallel=narrow))[0]
    errors = [max(abs(a - b) for a, b in zip(one.losses, expected.losses, strict=True)) for one in (plain, fused)]
    assert errors[1] <= max(2 * errors[0], 5e-3), errors


@long
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_layers_of_sharded_models_train_as_one_process(
    checkpointing: bool, two_ranks: Ranks, tiny_models
) -> None:
    settings = {"compile_layers": "always", "enable_gradient_checkpointing": checkpointing}
    case = Case(tiny_models["olmo"], model_settings=settings)
    expected = alone(case)
    for outcome, graphs, obstacles in two_ranks.run(train_with_compiled_layers, case):
        assert 1 <= graphs <= 3 and obstacles == {}
        assert outcome.losses == pytest.approx(expected.losses, rel=1e-5)
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-5)
        for name, value in outcome.weights.items():
            torch.testing.assert_close(value, expected.weights[name], rtol=1e-4, atol=1e-5)


IMAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one rank for each copy": {"parallel": fsdp(fsdp_size=1)},
    "frozen tower": {"model_settings": {"freeze_vision_tower": True}},
    "lora": {"model_settings": LORA, "optim": STEADY},
    "gradient checkpointing": {"model_settings": {"enable_gradient_checkpointing": True}},
}


@long
@pytest.mark.parametrize("what", IMAGES)
@pytest.mark.parametrize("arch", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_two_ranks_train_models_with_images_as_one(
    arch: str, what: str, two_ranks: Ranks, image_models: dict[str, Path]
) -> None:
    """The first rank has two of eight rows in micro-batches of one or two rows: some have images on one rank only."""
    assert_trains_as_one(two_ranks.run, Case(image_models[arch], images=True, budget=40, **IMAGES[what]))
