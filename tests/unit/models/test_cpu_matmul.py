"""The choice of the library that multiplies float32 matrices."""

from __future__ import annotations

import pytest
import torch

from hone.models.kernels.cpu import matmul as matmul
from hone.models.kernels.cpu.matmul import fast_float32_matmuls, onednn_is_exact

CPU = torch.device("cpu")


def precision() -> str:
    return torch.backends.mkldnn.matmul.fp32_precision  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("shape", [(1, 64, 64), (7, 256, 300), (300, 704, 256)])
def test_products_and_their_gradients_have_float32s_errors(shape):
    rows, inner, columns = shape
    left = torch.randn(rows, inner, requires_grad=True)
    right = torch.randn(columns, inner, requires_grad=True)
    with fast_float32_matmuls(CPU):
        found = torch.nn.functional.linear(left, right)
        gradients = torch.autograd.grad(found.square().sum(), (left, right))
    wide = [x.detach().double().requires_grad_() for x in (left, right)]
    exact = wide[0] @ wide[1].t()
    wanted = torch.autograd.grad(exact.square().sum(), wide)
    for x, y in zip((found, *gradients), (exact, *wanted), strict=True):
        assert float((x.detach() - y.detach()).norm() / y.detach().norm()) < 1e-5


def test_the_setting_is_as_before_also_after_an_error():
    before = precision()
    with pytest.raises(RuntimeError), fast_float32_matmuls(CPU):
        raise RuntimeError
    assert precision() == before


def test_a_processor_that_rounds_keeps_torchs_matmuls(monkeypatch):
    before = precision()
    monkeypatch.setattr(matmul, "onednn_is_exact", lambda: False)
    with fast_float32_matmuls(CPU):
        assert precision() == before


def test_rounding_is_noticed(monkeypatch):
    """The check detects matmuls that are rounded to bfloat16."""
    monkeypatch.setattr(
        matmul, "_FLOAT32_ERROR", 1e-9
    )  # float32 itself fails such a bound, as bfloat16 fails the real one
    assert not onednn_is_exact.__wrapped__()
