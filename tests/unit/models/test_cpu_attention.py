"""Attention in blocks against torch's own kernel, sequence by sequence, and its gradients against finite differences."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.prefix_trees import context_of_groups, contexts, tokens_of
from torch import Tensor

from hone.models.attention import cpu
from hone.models.attention.cpu import CausalTiles, causal_attention
from hone.models.attention.packed import PackedContext


def states(
    tokens: int, heads: int, kv_heads: int, width: int, value_width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((heads, width), (kv_heads, width), (kv_heads, value_width))
    return [torch.randn(tokens, h, w, generator=generator, dtype=dtype).requires_grad_() for h, w in shapes]


def golden(packed: PackedContext, inputs: list[Tensor], scale: float) -> Tensor:
    """Each sequence alone, all of it; of its outputs the own tokens' are taken."""
    found = []
    for tokens, shared in zip(tokens_of(packed.sequences), packed.sequences.prefix_length.tolist(), strict=True):
        query, key, value = (x[tokens].transpose(0, 1)[None] for x in inputs)
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        found.append(out[0].transpose(0, 1)[shared:])
    return torch.cat(found)


def count_of(packed: PackedContext) -> int:
    return packed.position_ids.shape[1]


@given(
    packed=contexts(),
    heads=st.sampled_from([(1, 1), (2, 1), (6, 2)]),
    value_width=st.sampled_from([4, 8]),
    block=st.integers(1, 40),
    piece=st.sampled_from([1, 500, 1 << 19]),
)
@examples(60)
def test_values_and_gradients_equal_torchs_however_it_is_cut(packed, heads, value_width, block, piece):
    inputs = states(count_of(packed), *heads, 8, value_width)
    expected = golden(packed, inputs, 0.3)
    incoming = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(expected, inputs, incoming)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "QUERY_BLOCK", block)
        patch.setattr(cpu, "BLOCK_SCORES", piece)
        found = causal_attention(*inputs, 0.3, CausalTiles(packed.sequences))
        gradients = torch.autograd.grad(found, inputs, incoming)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients, wanted)


def test_gradients_are_those_of_finite_differences():
    packed = context_of_groups([3, 2], [[4, 2], [5]])
    inputs = states(count_of(packed), 4, 2, 3, 3)
    assert torch.autograd.gradcheck(lambda *x: causal_attention(*x, 0.5, CausalTiles(packed.sequences)), inputs)


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
def test_float32_around_the_size_of_a_block(length):
    packed = context_of_groups([7, 5], [[length, length], [length]])
    inputs = states(count_of(packed), 4, 2, 16, 16, torch.float32)
    found = causal_attention(*inputs, 0.25, CausalTiles(packed.sequences))
    torch.testing.assert_close(found, golden(packed, inputs, 0.25), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_computed_in_float32_also_under_autocast():
    packed = context_of_groups([10], [[50, 40]])
    inputs = states(count_of(packed), 4, 2, 16, 16, torch.bfloat16)
    exact = golden(packed, [x.float() for x in inputs], 0.25)
    with torch.autocast("cpu", torch.bfloat16):
        found = causal_attention(*inputs, 0.25, CausalTiles(packed.sequences))
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, exact.to(torch.bfloat16))
    gradients = torch.autograd.grad(found.float().square().sum(), inputs)
    assert [g.dtype for g in gradients] == [torch.bfloat16] * 3


def test_a_later_token_changes_nothing_exactly():
    packed = context_of_groups([30], [[200, 200]])
    inputs = [x.detach() for x in states(count_of(packed), 4, 2, 8, 8, torch.float32)]
    tiles = CausalTiles(packed.sequences)
    before = causal_attention(*inputs, 0.3, tiles)
    for x in inputs:
        x[180:230] = torch.randn(x[180:230].shape)  # the end of the first response
    after = causal_attention(*inputs, 0.3, tiles)
    assert torch.equal(before[:180], after[:180])
    assert torch.equal(before[230:], after[230:])
    assert not torch.equal(before[180:230], after[180:230])


def test_a_tile_gathers_few_keys_where_many_sequences_share_a_long_prefix():
    """Forty answers of 20 tokens to 2,000: 40 x 2,020 keys in one tile would be 30 times the packed tokens."""
    packed = context_of_groups([2000], [[20] * 40])
    tiles = CausalTiles(packed.sequences)
    keys = [tile.keys.numel() for tile in tiles.tiles]
    assert len(keys) > 2 and max(keys) <= 1 << 14 and sum(tile.rows for tile in tiles.tiles) == 40
    inputs = states(count_of(packed), 2, 1, 4, 4)
    torch.testing.assert_close(causal_attention(*inputs, 0.3, tiles), golden(packed, inputs, 0.3))


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60))
def test_tiles_are_mostly_full(lengths):
    assert 0.85 <= CausalTiles(PackedContext.from_lengths(lengths).sequences).fullness <= 1


@given(st.integers(1, 40), st.integers(1, 300), st.lists(st.integers(0, 7), min_size=1, max_size=60))
def test_prompts_and_the_responses_to_them_have_tiles_of_their_own(prompt, response, groups):
    """Equal prompts and equal responses leave no slot empty: the first response follows its prompt, the others have a prefix."""
    sizes = list(Counter(groups).values())
    tiles = CausalTiles(context_of_groups([prompt] * len(sizes), [[response] * size for size in sizes]).sequences)
    assert tiles.fullness == 1 and len(tiles.tiles) == 1 + (len(groups) > len(sizes))
    assert all(tile.hidden is None for tile in tiles.tiles)
