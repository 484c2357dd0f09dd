"""The Megatron-core backend in the conformance suite of training backends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import backend_checks as checks
from support.backend_cases import Case
from support.plain_training import alone
from support.train_backend_suite import Run, TrainBackendConformance, Ways

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
