"""The sum of squared probabilities: against plain Python, against the plain tensor form, and through the policy's head."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from hone.algorithms.logits import chunked_sum_pi_squared, sum_pi_squared_from_logits


@given(logits=st.lists(st.floats(-30, 30), min_size=1, max_size=6))
@examples(40)
def test_plain_form_equals_the_definition(logits: list[float]) -> None:
    total = math.fsum(math.exp(z - max(logits)) for z in logits)
    expected = math.fsum((math.exp(z - max(logits)) / total) ** 2 for z in logits)
    assert float(sum_pi_squared_from_logits(torch.tensor(logits, dtype=torch.float64))) == pytest.approx(expected)


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunked_equals_plain(chunk_size: int, softcap: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape).to(dtype) for shape in ((11, 6), (17, 6), (17,)))
    logits = torch.nn.functional.linear(hidden, weight, bias).float()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    got = chunked_sum_pi_squared(
        hidden.requires_grad_(), weight, bias=bias, temperature=0.7, softcap=softcap, chunk_size=chunk_size
    )
    assert got.dtype == torch.float32 and not got.requires_grad
    torch.testing.assert_close(got, sum_pi_squared_from_logits(logits / 0.7), atol=1e-6, rtol=1e-5)


def test_extremes() -> None:
    assert float(sum_pi_squared_from_logits(torch.tensor([0.0, -torch.inf]))) == 1
    assert float(sum_pi_squared_from_logits(torch.zeros(8, dtype=torch.bfloat16))) == pytest.approx(1 / 8)
