"""References of the fused operators for CUDA: gradients against differences, shapes without storage, rules of torch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from hone.models.kernels.cuda import pages as _pages  # noqa: F401  registers its operator
from hone.models.kernels.cuda import vocabulary as _vocabulary  # noqa: F401
from hone.models.kernels.cuda.gates import swiglu
from hone.models.kernels.cuda.heads import split_heads
from hone.models.kernels.cuda.matmuls import joint_linear
from hone.models.kernels.cuda.norms import add_rms_norm, rms_norm


def numbers(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


COS, SIN = numbers((4, 4), (4, 4))
HEADS = {"epsilon": 1e-5, "queries": 4, "keys": 2}
WIDE = torch.float64
FUNCTIONS: dict[str, tuple[Callable[..., Any], Sequence[tuple[int, ...]]]] = {
    "norm": (lambda x, w: rms_norm(x, w, 1e-5, WIDE), [(5, 6), (6,)]),
    "add, norm": (lambda x, y, w: add_rms_norm(x, y, w, 1e-5, WIDE), [(5, 6), (5, 6), (6,)]),
    "only the sum": (lambda x, y, w: add_rms_norm(x, y, w, 1e-5, WIDE)[0], [(5, 6), (5, 6), (6,)]),
    "only the norm": (lambda x, y, w: add_rms_norm(x, y, w, 1e-5, WIDE)[1], [(5, 6), (5, 6), (6,)]),
    "heads": (lambda joint: split_heads(joint, None, (COS, SIN), **HEADS), [(4, 8, 8)]),
    "normed heads": (lambda joint, w: split_heads(joint, w, (COS, SIN), **HEADS), [(4, 8, 8), (2, 8)]),
    "gate": (swiglu, [(3, 10)]),
    "projections": (lambda x, a, b: joint_linear(x, [a, b], []), [(3, 5), (2, 5), (4, 5)]),
    "biased": (lambda x, a, b, c, d: joint_linear(x, [a, b], [c, d]), [(3, 5), (2, 5), (4, 5), (2,), (4,)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_differences(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    assert torch.autograd.gradcheck(function, [part.requires_grad_() for part in numbers(*shapes)])


def test_references_are_the_usual_formulas() -> None:
    x, y, w = numbers((5, 6), (5, 6), (6,))
    total, normed = add_rms_norm(x, y, w, 1e-5, WIDE)
    assert torch.equal(total, x + y)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(x + y, (6,), w, 1e-5))
    gate, up = (joint := numbers((3, 10))[0]).chunk(2, -1)
    torch.testing.assert_close(swiglu(joint), torch.nn.functional.silu(gate) * up)


OPERATORS: dict[str, tuple[str, list[Any]]] = {}
for narrow in (torch.float32, torch.bfloat16):
    states, delta, joint, gates, grads = numbers((5, 6), (5, 6), (4, 8, 8), (3, 10), (3, 5), dtype=narrow)
    weight, norms, scale = numbers((6,), (2, 8), (5,), dtype=torch.float32)
    pages, integers = numbers((3, 4, 2, 8), dtype=narrow), torch.tensor([[2, 0], [1, 2]], dtype=torch.int32)
    cos, sin = COS.float(), SIN.float()
    of_heads = joint.split([4, 2, 2], 1)
    OPERATORS |= {
        f"add_rms_norm {narrow}": ("add_rms_norm", [states.float(), delta, weight, 1e-5, narrow]),
        f"rms_norm {narrow}": ("add_rms_norm", [states.float(), None, weight, 1e-5, narrow]),
        f"add_rms_norm_backward {narrow}": (
            "add_rms_norm_backward",
            [states.float(), delta, states.float(), weight, scale, narrow],
        ),
        f"split_heads {narrow}": ("split_heads", [joint, norms, cos, sin, 1e-5, 4, 2]),
        f"split_heads_backward {narrow}": (
            "split_heads_backward",
            [*(part.contiguous() for part in of_heads), joint, norms, cos, sin, 1e-5],
        ),
        f"swiglu {narrow}": ("swiglu", [gates]),
        f"swiglu_backward {narrow}": ("swiglu_backward", [grads, gates]),
        f"matmul_wide {narrow}": ("matmul_wide", [states.t(), delta]),
        f"add_matmul_wide {narrow}": ("add_matmul_wide", [torch.zeros(6, 6), states.t(), delta]),
        f"attend_pages {narrow}": (
            "attend_pages",
            [joint[:2, :4], pages[0], pages[0] + 1, integers, integers[0] + 3, weight[:4], 0.3, 3, 5.0],
        ),
        f"vocabulary_statistics {narrow}": ("vocabulary_statistics", [states, delta, None, torch.arange(5), 0.7, None]),
        f"vocabulary_gradient {narrow}": (
            "vocabulary_gradient",
            [states, delta, None, torch.arange(5), scale, scale, scale, scale, 0.7, 5.0],
        ),
    }


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_keep_torchs_rules(name: str) -> None:
    """Schema, shapes and dtypes on tensors without storage, and registration of the gradient."""
    operator, arguments = OPERATORS[name]
    checks = ("test_schema", "test_faketensor")
    results = opcheck(getattr(torch.ops.hone, operator).default, arguments, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


def test_weight_gradients_are_not_rounded_to_the_compute_dtype() -> None:
    states, one, other, incoming = numbers((64, 8), (3, 8), (2, 8), (64, 5), dtype=torch.float32)
    one.requires_grad_(), other.requires_grad_()
    out = joint_linear(states.bfloat16(), [one, other], [])
    assert out.dtype == torch.bfloat16
    out.backward(incoming.bfloat16())
    exact = incoming.bfloat16().double().t() @ states.bfloat16().double()
    for found, wanted in zip((one.grad, other.grad), exact.split([3, 2]), strict=True):
        assert found is not None and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
