"""The fused output layer, by its operators' references on the CPU, against chunks of rows and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_simulation.simulation import META, simulated_gpu
from torch import Tensor

from hone.algorithms.logits import chunked_log_probs
from hone.models import heads
from hone.models.heads import fused_log_probs

ROWS, VOCABULARY, WIDTH = 300, 17, 6


def problem(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, WIDTH), (VOCABULARY, WIDTH), (VOCABULARY,))
    leaves = [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes
    ]
    return [*leaves, torch.randint(0, VOCABULARY, (ROWS,), generator=generator)]


@pytest.mark.parametrize("learns_entropy", [True, False])
@pytest.mark.parametrize("settings", [{}, {"softcap": 2.0, "temperature": 0.7}], ids=["plain", "cap, temperature"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_values_and_gradients_are_those_of_chunks(
    with_bias: bool, settings: dict[str, float], learns_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "_GRADIENTS", 128 * VOCABULARY)  # three chunks in the backward pass
    hidden, weight, bias, targets = problem()
    inputs = [hidden, weight, *([bias] if with_bias else [])]
    options: dict[str, Any] = {"bias": bias if with_bias else None, "with_entropy": True, **settings}
    outcomes = []
    for compute in (fused_log_probs, chunked_log_probs):
        log_probs, entropy = compute(hidden, weight, targets, **options)
        assert entropy is not None
        loss = (log_probs * torch.arange(ROWS)).sum() + (entropy.square().sum() if learns_entropy else 0)
        outcomes.append([log_probs.detach(), entropy.detach(), *torch.autograd.grad(loss, inputs)])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


def test_bfloat16_rounds_neither_logits_nor_the_weight_gradient() -> None:
    hidden, weight, _, targets = problem(torch.float32)
    exact = chunked_log_probs(hidden.bfloat16().double(), weight.bfloat16().double(), targets)[0]
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, entropy = fused_log_probs(hidden, weight, targets)
    assert entropy is None and log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(log_probs.sum(), weight)
    assert grad.dtype == torch.float32 and not torch.equal(grad, grad.bfloat16().float())


def test_a_gpu_holds_no_float32_logits() -> None:
    with simulated_gpu() as gpu, torch.autocast("meta"):
        hidden, weight = (torch.empty(4096, 64, device=META).requires_grad_() for _ in range(2))
        assert heads.fuses(hidden)
        log_probs, _ = fused_log_probs(hidden, weight, torch.empty(4096, dtype=torch.int64, device=META))
        log_probs.sum().backward()
    logits = 4096 * 4096
    assert [k.name for k in gpu.kernels if k.moved >= 2 * logits] == ["vocabulary_gradient", "mm", "add_matmul_wide"]
    assert all(k.moved < 3 * logits for k in gpu.kernels), (
        "the gradients of logits have two bytes, and pass three times"
    )


def test_float32_and_the_cpu_keep_chunks_of_rows() -> None:
    assert not heads.fuses(torch.empty(2, 2)) and not heads.fuses(torch.empty(2, 2, dtype=torch.bfloat16))
    with simulated_gpu():
        assert not heads.fuses(torch.empty(2, 2, device=META))
        assert heads.fuses(torch.empty(2, 2, device=META, dtype=torch.bfloat16))
