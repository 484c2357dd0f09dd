"""Blocked attention against torch's own kernel, and its gradients against finite differences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hone.generation import cpu_attention
from hone.generation.cpu_attention import blocked_causal_attention


def states(
    rows: int, heads: int, kv_heads: int, length: int, width: int, value_width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    return [torch.randn(rows, h, length, w, generator=generator, dtype=dtype).requires_grad_() for h, w in shapes]


def blocked(inputs: list[Tensor], scale: float) -> Tensor:
    query, key, value = inputs
    return blocked_causal_attention(query, key, value, scale)


def golden(inputs: list[Tensor], scale: float) -> Tensor:
    query, key, value = inputs
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)


@given(
    rows=st.integers(1, 4),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    length=st.integers(1, 70),
    value_width=st.sampled_from([4, 8]),
    block=st.integers(1, 40),
    piece=st.sampled_from([1, 500, 1 << 19]),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_equal_torchs_however_it_is_cut(rows, kv_heads, group, length, value_width, block, piece):
    inputs = states(rows, kv_heads * group, kv_heads, length, 8, value_width)
    incoming = torch.randn(rows, kv_heads * group, length, value_width, dtype=torch.float64)
    expected = golden(inputs, 0.3)
    wanted = torch.autograd.grad(expected, inputs, incoming)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "QUERY_BLOCK", block)
        patch.setattr(cpu_attention, "PIECE", piece)
        found = blocked(inputs, 0.3)
        gradients = torch.autograd.grad(found, inputs, incoming)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)


def test_gradients_are_those_of_finite_differences():
    inputs = states(2, 4, 2, 5, 3, 3)
    assert torch.autograd.gradcheck(lambda *x: blocked(list(x), 0.5), inputs)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_float32_around_the_size_of_a_block(length):
    inputs = states(3, 4, 2, length, 16, 16, torch.float32)
    torch.testing.assert_close(blocked(inputs, 0.25), golden(inputs, 0.25), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_computed_in_float32_also_under_autocast():
    inputs = states(2, 4, 2, 50, 16, 16, torch.bfloat16)
    exact = golden([x.float() for x in inputs], 0.25)
    with torch.autocast("cpu", torch.bfloat16):
        found = blocked(inputs, 0.25)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.to(torch.bfloat16))
    gradients = torch.autograd.grad(found.float().square().sum(), inputs)
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 3


def test_a_later_token_changes_nothing_exactly():
    query, key, value = (x.detach() for x in states(2, 4, 2, 200, 8, 8, torch.float32))
    before = blocked_causal_attention(query, key, value, 0.3)
    for x in (query, key, value):
        x[:, :, 150:] = torch.randn(x[:, :, 150:].shape)
    after = blocked_causal_attention(query, key, value, 0.3)
    assert torch.equal(before[:, :, :150], after[:, :, :150])
    assert not torch.equal(before, after)
