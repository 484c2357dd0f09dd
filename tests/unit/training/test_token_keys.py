"""Keys of tokens: by text and position alone, in any order of rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import random_batch

from hone.data.ragged import Ragged
from hone.training.objectives import token_keys


@given(seed=st.integers(0, 1000), rows=st.integers(1, 12), data=st.data())
def test_a_key_goes_with_its_row_in_any_order(seed, rows, data):
    batch = random_batch(rows, seed)
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    keys = token_keys(prompts, responses)
    order = data.draw(st.permutations(range(rows)))
    some = order[: data.draw(st.integers(0, rows))]
    found = token_keys(prompts.select(some), responses.select(some))
    assert torch.equal(found.values, keys.select(some).values)
    assert keys.lengths.tolist() == responses.lengths.tolist()


def test_keys_differ_by_prompt_response_and_place():
    prompts = Ragged.from_rows([[1, 2], [1, 2], [2, 1], [1], [1, 2]], torch.int64)
    responses = Ragged.from_rows([[7, 7, 7], [7, 7, 8], [7, 7, 7], [2, 7, 7], [7, 7, 7]], torch.int64)
    keys = token_keys(prompts, responses).to_lists()
    assert keys[0] == keys[4]
    assert len({key for row in keys[:4] for key in row}) == 12


def test_keys_are_spread_evenly():
    """Of ten thousand tokens with similar text about half have each bit set."""
    prompts = Ragged.from_rows([[1, 2, 3]] * 100, torch.int64)
    responses = Ragged.from_rows([[number % 10, number // 10] * 50 for number in range(100)], torch.int64)
    values = token_keys(prompts, responses).values
    for bit in range(63):  # the sign is not used
        share = float(((values >> bit) & 1).double().mean())
        assert 0.45 < share < 0.55, bit
