"""The Megatron-core backend in the conformance suite of training backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import backend_checks as checks
from support.backend_cases import Case, backend_of, save_model, train
from support.messages import raises
from support.plain_training import alone
from support.ranks import Ranks
from support.train_backend_suite import STEADY, Run, TrainBackendConformance, Ways, assert_trains_as_one, close

from hone.errors import HoneError

pytestmark = pytest.mark.application("hone/training/backends/megatron", "hone/training/backends/protocol.py")
pytest.importorskip("megatron.core", reason="megatron-core is not installed (extra megatron)")

TENSOR = {"tensor_model_parallel_size": 2}
PIPELINE = {"pipeline_model_parallel_size": 2}


class TestMegatron(TrainBackendConformance):
    strategy = "megatron"
    layouts = {
        "one process": Ways(),
        "data": Ways(2),
        "tensor": Ways(2, TENSOR),
        "pipeline": Ways(2, PIPELINE),
    }
    without = frozenset({"adapters", "other optimizers", "averages"})

    def test_exported_weights(self, layout: str, run: Run, tiny_models: dict[str, Any]) -> None:
        """``all`` and ``merged`` are the same without an adapter."""
        case = self.case(layout, tiny_models["tied"], updates=2)
        expected = alone(case).weights
        for exports in run(checks.every_export, case):
            assert exports["all"].keys() == exports["merged"].keys() == expected.keys()
            assert not exports["adapter"]
            assert all(torch.equal(value, exports["merged"][name]) for name, value in exports["all"].items())

    @pytest.mark.parametrize("model", ["tied", "untied", "qwen2"])
    def test_export_is_what_was_imported(self, model: str, layout: str, run: Run, tiny_models: dict[str, Any]) -> None:
        case = self.case(layout, tiny_models[model], updates=0)
        expected = alone(Case(case.model, updates=0)).weights
        for exports in run(checks.every_export, case):
            assert exports["all"].keys() == expected.keys()
            assert all(torch.equal(exports["all"][name], value) for name, value in expected.items())


EXPERT = {"expert_parallel_size": 2}
TWO_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("experts", {}),
    "expert": ("experts", {"parallel": EXPERT}),
    "expert, chosen experts alone": ("normalised", {"parallel": EXPERT}),
    "expert, gradient checkpointing": (
        "experts",
        {"parallel": EXPERT, "model_settings": {"enable_gradient_checkpointing": True}},
    ),
    "pipeline, experts": ("experts", {"parallel": PIPELINE}),
    "pipeline, qwen2": ("qwen2", {"parallel": PIPELINE}),
    "tensor, untied": ("untied", {"parallel": TENSOR}),
    "tensor, qwen2": ("qwen2", {"parallel": TENSOR}),
    "tensor, tokens from supports": ("tied", {"restricted": True, "parallel": TENSOR, "optim": STEADY}),
    "pipeline, gradient checkpointing": (
        "tied",
        {"parallel": PIPELINE, "model_settings": {"enable_gradient_checkpointing": True}},
    ),
}
FOUR_RANKS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor, pipeline": ("tied", {"parallel": TENSOR | PIPELINE}),
    "tensor, data": ("qwen2", {"parallel": TENSOR}),
    "pipeline, data": ("untied", {"parallel": PIPELINE}),
    "four stages": ("deep", {"parallel": {"pipeline_model_parallel_size": 4}}),
    "four stages, critic": ("deep", {"parallel": {"pipeline_model_parallel_size": 4}, "kind": "value"}),
    "expert, data": ("experts", {"parallel": EXPERT}),
    "expert, pipeline": ("experts", {"parallel": EXPERT | PIPELINE}),
}


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny models, one with four tied layers, and one whose router normalises the probabilities of the chosen experts."""
    root = tmp_path_factory.mktemp("more")
    deep = save_model(root / "deep", "qwen3", tie_word_embeddings=True, num_hidden_layers=4)
    normalised = save_model(root / "normalised", "qwen3_moe", tie_word_embeddings=False, norm_topk_prob=True)
    return {**tiny_models, "deep": deep, "normalised": normalised}


def case(model: Path, parallel: dict[str, Any] | None = None, **changes: Any) -> Case:
    """A training with Megatron-core."""
    return Case(model, parallel={"strategy": "megatron", **(parallel or {})}, **changes)


@pytest.mark.parametrize("model", ["experts", "normalised", "qwen2", "untied"])
def test_one_process_trains_any_family(model: str, models: dict[str, Path]) -> None:
    assert_trains_as_one(lambda function, *args: [function(*args)], case(models[model]))


@pytest.mark.long("hone/training/backends/megatron")
@pytest.mark.parametrize("what", TWO_RANKS)
def test_two_ranks_train_as_one(what: str, two_ranks: Ranks, models: dict[str, Path]) -> None:
    model, changes = TWO_RANKS[what]
    assert_trains_as_one(two_ranks.run, case(models[model], **changes))


@pytest.mark.long("hone/training/backends/megatron")
@pytest.mark.parametrize("what", FOUR_RANKS)
def test_four_ranks_in_two_dimensions(what: str, four_ranks: Ranks, models: dict[str, Path]) -> None:
    model, changes = FOUR_RANKS[what]
    assert_trains_as_one(four_ranks.run, case(models[model], **changes))


@pytest.mark.long("hone/training/backends/megatron")
@pytest.mark.parametrize(("writer", "reader"), [(EXPERT, PIPELINE), (PIPELINE, EXPERT)])
def test_experts_go_on_in_another_layout(
    writer: dict[str, Any], reader: dict[str, Any], two_ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    expected = two_ranks.run(checks.uninterrupted, case(models["experts"], writer, updates=2))[0]
    two_ranks.run(checks.saved, case(models["experts"], writer, updates=2), tmp_path)
    for weights, losses in two_ranks.run(checks.resumed, case(models["experts"], reader, updates=2), tmp_path):
        close(losses, expected[1])
        assert weights.keys() == expected[0].keys()
        for name, value in expected[0].items():
            close(weights[name], value, name=name)


@pytest.mark.parametrize("model", ["tied", "experts"])
def test_bfloat16_stays_near_float32(model: str, models: dict[str, Path]) -> None:
    narrow = {"updates": 1, "dtype": "bfloat16"}
    exact, rounded = (train(case(models[model], **changes)) for changes in ({"updates": 1}, narrow))
    assert rounded.losses == pytest.approx(exact.losses, abs=0.1)
    assert rounded.norms == pytest.approx(exact.norms, rel=0.1)
    assert rounded.losses != pytest.approx(exact.losses, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model_settings": {"lora_rank": 4}}, "model.lora_rank=4"),
        ({"optim": {"optimizer": "SGD"}}, "optim.optimizer=SGD"),
        ({"optim": {"ema_decay": 0.5}}, "optim.ema_decay=0.5"),
        ({"kind": "reward"}, "reward models"),
        ({"model_settings": {"override_config": {"hidden_act": "gelu"}}}, "hidden_act=gelu"),
    ],
)
def test_what_is_not_supported_is_refused(settings: dict[str, Any], message: str, models: dict[str, Path]) -> None:
    with raises(HoneError, message, "strategy=fsdp2"):
        backend_of(case(models["tied"], **settings))
