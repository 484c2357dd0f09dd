"""Micro-batch plans and packing."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.training.packing import pack, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 100), st.none() | st.integers(1, 5))
def test_every_row_stands_in_exactly_one_micro_batch_within_the_budget(lengths, budget, rows):
    plan = plan_micro_batches(torch.tensor(lengths), budget, rows)
    assert sorted(row for micro in plan for row in micro) == list(range(len(lengths)))
    for micro in plan:
        assert len(micro) == 1 or sum(lengths[row] for row in micro) <= budget
        assert rows is None or len(micro) <= rows


@given(LENGTHS)
def test_neighbours_in_a_plan_have_similar_lengths(lengths):
    order = [row for micro in plan_micro_batches(torch.tensor(lengths), 64) for row in micro]
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8))
def test_packed_row_holds_each_sequence_whole_and_points_at_what_predicts_its_response(shapes):
    prompts, responses, number = [], [], 0
    for prompt, response in shapes:
        prompts.append(list(range(number, number + prompt)))
        responses.append(list(range(number + prompt, number + prompt + response)))
        number += prompt + response
    batch = Batch({"prompt_ids": Ragged.from_rows(prompts), "response_ids": Ragged.from_rows(responses)})
    packed = pack(batch, torch.device("cpu"))
    assert packed.input_ids[0].tolist() == list(range(number))
    assert packed.targets.tolist() == [token for row in responses for token in row]
    assert packed.input_ids[0][packed.output_index].tolist() == [token - 1 for row in responses for token in row]
    assert packed.layout.position_ids[0].tolist() == [i for p, r in shapes for i in range(p + r)]
