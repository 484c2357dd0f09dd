"""Micro-batch plans and packing."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises
from support.prefix_trees import tokens_of, tree_batch

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.training.packing import pack, packed_rows, plan_micro_batches

GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 9), min_size=1, max_size=4)), min_size=1, max_size=6
)
"""Prompt length, and response lengths of its group."""
TREES = st.builds(tree_batch, st.integers(0, 10**6), st.integers(1, 12))
"""Rows that share prefixes at any depth."""


def batch_of(groups) -> Batch:
    """Prompts hold their group's number; response tokens are numbered through the batch from 1000."""
    prompts, responses, number = [], [], 1000
    for group, (length, sizes) in enumerate(groups):
        for size in sizes:
            prompts.append([group] * length)
            responses.append(list(range(number, number + size)))
            number += size
    return Batch({"prompt_ids": Ragged.from_rows(prompts), "response_ids": Ragged.from_rows(responses)})


@given(GROUPS, st.integers(1, 60), st.none() | st.integers(1, 5))
def test_every_row_is_in_exactly_one_micro_batch_within_the_budget(groups, budget, rows):
    batch = batch_of(groups)
    plan = plan_micro_batches(batch.ragged("prompt_ids"), batch.ragged("response_ids"), budget, rows)
    assert sorted(row for micro in plan for row in micro) == list(range(len(batch)))
    for micro in plan:
        packed = pack(batch.reorder(micro), torch.device("cpu"))
        assert len(micro) == 1 or packed.input_ids.numel() <= budget
        assert rows is None or len(micro) <= rows


@given(GROUPS)
def test_a_prompt_is_stored_once_for_its_group(groups):
    packed = pack(batch_of(groups), torch.device("cpu"))
    prompts, responses = sum(length for length, _ in groups), sum(sum(sizes) for _, sizes in groups)
    assert packed.input_ids.numel() == prompts + responses


@given(TREES)
def test_every_token_of_a_tree_is_packed_once_after_its_prefix(batch):
    rows = [
        prompt + response
        for prompt, response in zip(
            batch.ragged("prompt_ids").to_lists(), batch.ragged("response_ids").to_lists(), strict=True
        )
    ]
    packed = pack(batch, torch.device("cpu"))
    ids, count = packed.input_ids[0].tolist(), packed.input_ids.numel()
    assert count == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    context, index = packed_rows(batch.ragged("prompt_ids"), batch.ragged("response_ids"))
    assert torch.equal(context.position_ids, packed.context.position_ids)
    assert [[ids[i] for i in places] for places in index.to_lists()] == rows
    assert index.to_lists() == [sorted(places) for places in index.to_lists()]
    seen = {place for tokens in tokens_of(context.sequences) for place in tokens}
    assert seen == set(range(count))


@given(TREES)
def test_outputs_are_read_at_the_token_before_each_response_token(batch):
    packed = pack(batch, torch.device("cpu"))
    ids, positions = packed.input_ids[0].tolist(), packed.context.position_ids[0].tolist()
    expected_before, expected_place = [], []
    for prompt, response in zip(
        batch.ragged("prompt_ids").to_lists(), batch.ragged("response_ids").to_lists(), strict=True
    ):
        expected_before += [prompt[-1], *response[:-1]]
        expected_place += range(len(prompt) - 1, len(prompt) + len(response) - 1)
    columns = {"before": packed.output_index, "target": packed.targets, "place": packed.target_index}
    by_row = {
        name: values.long().tolist()
        for name, values in packed.outputs_by_row({name: values.double() for name, values in columns.items()}).items()
    }
    assert by_row["target"] == batch.ragged("response_ids").values.tolist()
    assert [ids[i] for i in by_row["before"]] == expected_before
    assert [positions[i] for i in by_row["before"]] == expected_place
    assert [positions[i] - 1 for i in by_row["place"]] == expected_place


@given(TREES)
def test_a_shared_response_token_is_scored_once(batch):
    packed = pack(batch, torch.device("cpu"))
    rows = zip(batch.ragged("prompt_ids").to_lists(), batch.ragged("response_ids").to_lists(), strict=True)
    scored = {
        tuple((prompt + response)[:end])
        for prompt, response in rows
        for end in range(len(prompt) + 1, len(prompt) + len(response) + 1)
    }
    assert len(packed.targets) == len(packed.output_index) == len(packed.target_index.unique()) == len(scored)


@given(TREES, st.integers(1, 60))
def test_a_tree_is_planned_within_the_budget_that_its_packing_needs(batch, budget):
    plan = plan_micro_batches(batch.ragged("prompt_ids"), batch.ragged("response_ids"), budget)
    sizes = [pack(batch.reorder(rows), torch.device("cpu")).input_ids.numel() for rows in plan]
    assert all(size <= budget or len(rows) == 1 for size, rows in zip(sizes, plan, strict=True))
    for rows, following in zip(plan, plan[1:], strict=False):
        joined = pack(batch.reorder([*rows, following[0]]), torch.device("cpu"))
        assert joined.input_ids.numel() > budget, "a row opens a micro-batch only if it has to"


@given(GROUPS, st.integers(1, 60), st.none() | st.integers(1, 5), st.sampled_from([None, 2]), st.integers(0, 4))
def test_a_plan_of_a_given_count_has_it_within_the_budget(groups, budget, limit, unit, more):
    """What ranks do that work in step: as many micro-batches as the one that needs most."""
    batch = batch_of(groups)
    prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
    together = None if unit is None else torch.arange(len(batch)) // unit
    count = len(plan_micro_batches(prompts, responses, budget, limit, together)) + more
    plan = plan_micro_batches(prompts, responses, budget, limit, together, count=count)
    assert len(plan) == count
    assert sorted(row for micro in plan for row in micro) == list(range(len(batch)))
    least = 1 if unit is None else unit
    for micro in filter(None, plan):
        packed = pack(batch.reorder(micro), torch.device("cpu"))
        assert len(micro) <= least or packed.input_ids.numel() <= budget
        assert limit is None or len(micro) <= max(limit, least)
        if unit is not None:
            assert all((row ^ 1) in micro for row in micro if row ^ 1 < len(batch)), "a pair was parted"
    if unit is None:
        assert sum(map(bool, plan)) == min(count, len(batch)), "empty only where there are too few rows"


def test_micro_batches_of_a_given_count_are_even_and_the_heaviest_is_first():
    batch = batch_of([(1, [size]) for size in (9, 8, 7, 6, 5, 4, 3, 2)])
    prompts, lengths = batch.ragged("prompt_ids"), batch.ragged("response_ids").lengths
    plan = plan_micro_batches(prompts, batch.ragged("response_ids"), 30, count=4)
    sums = [sum(int(lengths[row]) + 1 for row in micro) for micro in plan]
    assert sums == [13, 13, 13, 13]
    uneven = plan_micro_batches(prompts, batch.ragged("response_ids"), 30, count=3)
    tokens = [sum(int(lengths[row]) + 1 for row in micro) for micro in uneven]
    assert tokens == sorted(tokens, reverse=True) and max(tokens) - min(tokens) <= 2


def test_a_count_below_what_the_budget_takes_is_a_mistake_of_the_program():
    batch = batch_of([(1, [9]), (1, [9])])
    with raises(ValueError, "2 micro-batches", 10, 1):
        plan_micro_batches(batch.ragged("prompt_ids"), batch.ragged("response_ids"), 10, count=1)
