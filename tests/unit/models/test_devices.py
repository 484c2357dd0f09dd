"""What dtype=auto means on each device."""

from __future__ import annotations

import pytest
import torch

from hone.config.dtypes import resolve_dtype
from hone.models.devices import computes_bfloat16, dtype_on, run_device
from hone.training.engine import TrainSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("supported", [False, True])
def test_auto_is_bfloat16_on_a_gpu_that_has_it(monkeypatch: pytest.MonkeyPatch, supported: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    expected = "bfloat16" if supported else "float32"
    assert computes_bfloat16(CUDA) is supported and computes_bfloat16(CPU) is False
    assert dtype_on(CUDA, "auto") == TrainSettings(CUDA, dtype="auto").dtype == expected
    assert dtype_on(CPU, "auto") == TrainSettings(CPU, dtype="auto").dtype == "float32"
    for dtype in ("float32", "bfloat16"):
        assert dtype_on(CUDA, dtype) == dtype_on(CPU, dtype) == TrainSettings(CUDA, dtype=dtype).dtype == dtype
    assert [run_device(choice).type for choice in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def test_without_a_gpu_the_device_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert [run_device(choice).type for choice in ("auto", "cuda", "cpu")] == ["cpu"] * 3


def test_only_auto_is_resolved() -> None:
    assert [resolve_dtype(name, bfloat16=True) for name in ("auto", "float32", "bfloat16")] == [
        "bfloat16",
        "float32",
        "bfloat16",
    ]
    assert resolve_dtype("auto", bfloat16=False) == "float32"
