"""What dtype=auto means on each device."""

from __future__ import annotations

import pytest
import torch

from hone.config.dtypes import resolve_dtype
from hone.models import devices
from hone.models.devices import (
    ALLOCATOR_VARIABLES,
    computes_bfloat16,
    dtype_on,
    ordinary_segments,
    run_device,
    use_expandable_segments,
)
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


@pytest.mark.parametrize(
    ("device", "variable", "sets"),
    [(CUDA, None, True), (CPU, None, False), *((CUDA, name, False) for name in ALLOCATOR_VARIABLES)],
)
def test_segments_expand_unless_the_user_has_configured_the_allocator(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, variable: str | None, sets: bool
) -> None:
    settings: list[str] = []
    for name in ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "max_split_size_mb:128")
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    use_expandable_segments(device)
    assert settings == ["expandable_segments:True"] * sets


@pytest.mark.parametrize("user", ["", "max_split_size_mb:128", "max_split_size_mb:128,expandable_segments:True"])
def test_segments_of_a_fixed_size_are_for_one_block_only(monkeypatch: pytest.MonkeyPatch, user: str) -> None:
    """Torch 2.11 sets the allocator and cannot be asked for its settings."""
    monkeypatch.setattr(devices, "_set_here", "")
    monkeypatch.setenv(ALLOCATOR_VARIABLES[0], user)
    monkeypatch.delenv(ALLOCATOR_VARIABLES[1], raising=False)
    monkeypatch.delattr(torch._C, "_accelerator_getAllocatorSettings", raising=False)
    settings = [user]
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", settings.append)
    use_expandable_segments(CUDA)
    before = settings[-1]
    with pytest.raises(ZeroDivisionError), ordinary_segments():
        assert not settings[-1].endswith("expandable_segments:True") and settings[-1].startswith(user)
        raise ZeroDivisionError
    assert settings[-1] == before
    assert len(settings) == {"": 4, "max_split_size_mb:128": 1}.get(user, 3)
