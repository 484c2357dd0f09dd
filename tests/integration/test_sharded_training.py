"""However a model is divided over processes, it is trained as in one: losses, gradient norms, weights, log-probs."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st
from support.examples import examples
from support.ranks import Ranks
from support.sharded_cases import Case, Outcome, alone, dtypes, reference, train

pytestmark = pytest.mark.long

TOLERANCE = 1e-5
ROUNDING = 2e-6
"""What float32 may take from a log-prob of a few units."""
TENSOR = {"tensor_model_parallel_size": 2}
SEQUENCE = {"ulysses_sequence_parallel_size": 2}
EXPERT = {"expert_parallel_size": 2}
LORA = {"lora_rank": 4}


def fsdp(**settings: Any) -> dict[str, Any]:
    return {"fsdp_config": settings}


WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fsdp": ("tied", {}),
    "fsdp kept after forward": ("tied", {"parallel": fsdp(reshard_after_forward=False)}),
    "two copies": ("tied", {"parallel": fsdp(fsdp_size=1)}),
    "everything offloaded": ("tied", {"parallel": fsdp(offload_policy=True)}),
    "offloaded while at rest": ("tied", {"parallel": fsdp(param_offload=True, optimizer_offload=True)}),
    "gradient checkpointing": ("tied", {"model_settings": {"enable_gradient_checkpointing": True}}),
    "another optimizer": (
        "tied",
        {"optim": {"lr": 0.03, "optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}}},
    ),
    "critic": ("tied", {"kind": "value"}),
    "a loss that compares the tokens of all ranks": ("tied", {"loss_mode": "kl_cov"}),
    "another one": ("tied", {"loss_mode": "m2po"}),
    "lora": ("tied", {"model_settings": LORA}),
    "tensor": ("tied", {"parallel": TENSOR}),
    "tensor, untied": ("untied", {"parallel": TENSOR}),
    "tensor, vocabulary that does not divide": ("odd", {"parallel": TENSOR}),
    "tensor, a plan that gathers": ("olmo", {"parallel": TENSOR}),
    "tensor, critic": ("tied", {"parallel": TENSOR, "kind": "value"}),
    "tensor, lora": ("tied", {"parallel": TENSOR, "model_settings": LORA}),
    "tensor, experts whole": ("experts", {"parallel": TENSOR}),
    "sequence": ("tied", {"parallel": SEQUENCE}),
    "sequence, critic": ("tied", {"parallel": SEQUENCE, "kind": "value"}),
    "sequence, lora": ("tied", {"parallel": SEQUENCE, "model_settings": LORA}),
    "sequence, sinks and windows": ("gpt_oss", {"parallel": SEQUENCE}),
    "fsdp, experts": ("experts", {}),
    "expert": ("experts", {"parallel": EXPERT}),
    "expert, biases": ("gpt_oss", {"parallel": EXPERT}),
    "expert, gradient checkpointing": (
        "experts",
        {"parallel": EXPERT, "model_settings": {"enable_gradient_checkpointing": True}},
    ),
}


def assert_same(found: Outcome, expected: Outcome, shifted: Outcome | None = None) -> None:
    """Both are equal, up to the tolerance and to what ``shifted`` says that rounding of log-probs alone may change."""
    close(found.losses, expected.losses, shifted and shifted.losses)
    close(found.norms, expected.norms, shifted and shifted.norms, rtol=TOLERANCE)
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        close(found.weights[name], value, shifted and shifted.weights[name], name=name)
    for name, value in expected.columns.items():
        close(found.columns[name], value, shifted and shifted.columns[name], rtol=TOLERANCE, name=name)


def close(found: Any, expected: Any, shifted: Any = None, *, rtol: float = 0.0, name: str = "") -> None:
    found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
    moved = 0.0 if shifted is None else (torch.as_tensor(shifted, dtype=torch.float64) - expected).abs()
    excess = (found - expected).abs() - (TOLERANCE + rtol * expected.abs() + moved)
    assert found.shape == expected.shape and (excess <= 0).all(), (name, float(excess.max()))


def moved(outcome: Outcome, case: Case) -> bool:
    """Whether training has changed the weights much more than the tolerance."""
    before = alone(dataclasses.replace(case, updates=0)).weights
    return max(float((outcome.weights[name] - before[name]).abs().max()) for name in before) > 50 * TOLERANCE


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_train_as_one(way: str, two_ranks: Ranks, tiny_models) -> None:
    model, changes = WAYS[way]
    case = Case(tiny_models[model], **changes)
    expected = alone(case)
    assert moved(expected, case)
    for outcome in two_ranks.run(train, case):
        assert_same(outcome, expected)


@examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 9),
    budget=st.integers(8, 150),
    way=st.sampled_from(["fsdp", "two copies", "sequence", "tensor"]),
    mode=st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]),
)
@example(seed=705, rows=1, budget=8, way="sequence", mode="token-mean")  # gain and KL penalty of the only token cancel
def test_any_rows_in_any_micro_batches(seed, rows, budget, way, mode, two_ranks: Ranks, tiny_models) -> None:
    """Ragged rows, shares of unequal size (one may be empty), micro-batches of any size."""
    model, changes = WAYS[way]
    case = Case(tiny_models[model], updates=1, rows=rows, seed=seed, budget=budget, loss_agg_mode=mode, **changes)
    expected = alone(dataclasses.replace(case, budget=10**6))
    shifted = alone(dataclasses.replace(case, budget=10**6, shift=ROUNDING))
    for outcome in two_ranks.run(train, case):
        assert_same(outcome, expected, shifted)


def test_each_rank_holds_its_part_only(two_ranks: Ranks, tiny_models) -> None:
    whole = alone(Case(tiny_models["experts"], updates=0)).parameters
    for parallel in ({}, EXPERT):
        held = [o.parameters for o in two_ranks.run(train, Case(tiny_models["experts"], parallel=parallel, updates=0))]
        assert sum(held) == whole
        assert max(held) < 0.51 * whole


@pytest.mark.parametrize("parallel", [{}, TENSOR, SEQUENCE])
def test_the_reference_is_the_model_with_its_adapter_off(parallel, two_ranks: Ranks, tiny_models) -> None:
    base = alone(Case(tiny_models["tied"], updates=0)).columns["log_probs"]
    for log_probs in two_ranks.run(reference, Case(tiny_models["tied"], parallel=parallel, model_settings=LORA)):
        torch.testing.assert_close(log_probs, base, atol=TOLERANCE, rtol=TOLERANCE)


def test_parameters_may_be_gathered_in_bfloat16(two_ranks: Ranks, tiny_models) -> None:
    case = Case(tiny_models["tied"], parallel=fsdp(mixed_precision={"param_dtype": "bfloat16"}))
    expected = alone(dataclasses.replace(case, updates=1))
    for outcome, shards in two_ranks.run(dtypes, case):
        assert shards == {torch.float32}
        assert outcome.losses != pytest.approx(expected.losses, abs=1e-5)  # rounded, so it did happen
        assert outcome.losses == pytest.approx(expected.losses, abs=0.1)
        assert outcome.norms == pytest.approx(expected.norms, rel=0.1)


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("tied", {}),
        ("tied", {"parallel": fsdp(fsdp_size=2)}),
        ("tied", {"parallel": TENSOR}),
        ("tied", {"parallel": SEQUENCE}),
        ("tied", {"parallel": TENSOR | SEQUENCE}),
        ("tied", {"parallel": TENSOR, "model_settings": LORA}),
        ("tied", {"parallel": TENSOR | fsdp(fsdp_size=1), "kind": "value"}),
        ("experts", {"parallel": EXPERT}),
        ("experts", {"parallel": EXPERT | fsdp(fsdp_size=2)}),
        ("experts", {"parallel": EXPERT | SEQUENCE}),
        ("experts", {"parallel": EXPERT | TENSOR}),
        ("experts", {"parallel": {"expert_parallel_size": 4}}),
        ("untied", {"parallel": {"ulysses_sequence_parallel_size": 4}}),  # more ranks than key-value heads
    ],
)
def test_four_ranks_in_two_dimensions(model: str, changes: dict[str, Any], four_ranks: Ranks, tiny_models) -> None:
    case = Case(tiny_models[model], **changes)
    expected = alone(case)
    for outcome in four_ranks.run(train, case):
        assert_same(outcome, expected)


@pytest.fixture(scope="module")
def four_ranks():
    with Ranks(4) as ranks:
        yield ranks
