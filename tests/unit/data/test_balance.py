"""Balance: partitions against exhaustive search, loads against counting, and what balance promises."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from oracles.partitions import best_makespan, load
from support.prefix_trees import random_rows

from hone.data.balance import (
    CostModel,
    Lengths,
    _Partial,
    balance,
    balance_metrics,
    in_order,
    karmarkar_karp,
    load_of,
    part_of_rows,
)
from hone.data.prefixes import PrefixOrder
from hone.data.ragged import Ragged

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=40)
GROUPS = st.lists(
    st.tuples(st.integers(1, 60), st.lists(st.integers(1, 90), min_size=1, max_size=6)), min_size=1, max_size=8
)
"""Prompt length, and response lengths of its group."""


def lengths_of(groups, unit: int | None = None) -> Lengths:
    group_of, prompts, responses = zip(*rows_of(groups), strict=True)
    units = None if unit is None else torch.arange(len(group_of)) // unit
    return Lengths.from_uids(torch.tensor(prompts), torch.tensor(responses), group_of, units)


def rows_of(groups) -> list[tuple[int, int, int]]:
    return [(number, prompt, size) for number, (prompt, sizes) in enumerate(groups) for size in sizes]


# ---------------------------------------------------------------------------------------------------------- partitions


@given(COSTS, st.integers(1, 9), st.booleans())
def test_every_item_is_in_one_part_and_no_part_is_needlessly_empty(costs, parts, equal_count):
    parts_of_items = karmarkar_karp(np.array(costs, float), parts, equal_count=equal_count)
    assert len(parts_of_items) == parts
    assert sorted(item for part in parts_of_items for item in part) == list(range(len(costs)))
    sizes = [len(part) for part in parts_of_items]
    assert min(sizes) >= min(1, len(costs) // parts)
    if equal_count:
        assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(1, 30), min_size=2, max_size=7), st.integers(2, 3), st.booleans())
def test_partitions_are_near_the_best_there_is(costs, parts, equal_count):
    parts_of_items = karmarkar_karp(np.array(costs, float), parts, equal_count=equal_count)
    reached = max(sum(costs[item] for item in part) for part in parts_of_items)
    best = best_makespan(costs, parts, equal_count=equal_count)
    assert best <= reached <= (4 / 3 if not equal_count else 2 - 1 / parts) * best


def test_largest_differencing_on_the_textbook_example():
    """{8, 7, 6, 5, 4} over two: 16 and 14, where always giving the next item to the lighter part would end at 17 and 13."""
    parts_of_items = karmarkar_karp(np.array([8.0, 7, 6, 5, 4]), 2)
    assert sorted(sum([8, 7, 6, 5, 4][item] for item in part) for part in parts_of_items) == [14, 16]


def test_sixteen_thousand_sequences_over_a_thousand_ranks_take_two_merges_each(monkeypatch):
    generator = np.random.default_rng(0)
    groups, n = 2048, 8
    responses = np.clip(generator.lognormal(7.5, 0.8, groups * n), 16, 16384).astype(np.int64)
    prompts = torch.from_numpy(generator.integers(64, 1024, groups)).repeat_interleave(n)
    lengths = Lengths.from_uids(prompts, torch.from_numpy(responses), np.arange(groups).repeat(n).tolist())
    merges, merge = [], _Partial.merge
    monkeypatch.setattr(_Partial, "merge", lambda *of: merges.append(1) or merge(*of))
    parts = balance(lengths, 1024)
    assert parts is not None and len(merges) < 2 * groups * n  # 30,666; 0.6 s on an idle core
    metrics = balance_metrics(lengths, parts)
    assert metrics["global_seqlen/imbalance"] > 1.5 and metrics["global_seqlen/balanced_imbalance"] < 1.1


# ---------------------------------------------------------------------------------------------------------------- loads


@given(GROUPS, st.integers(1, 5), st.randoms(use_true_random=False), st.integers(1, 500))
def test_loads_are_what_counting_token_by_token_gives(groups, parts, random, pairs_per_token):
    lengths = lengths_of(groups)
    part_of = np.array([random.randrange(parts) for _ in range(len(lengths))])
    counted = load_of(lengths, part_of, parts, CostModel(pairs_per_token))
    for part in range(parts):
        rows = np.flatnonzero(part_of == part).tolist()
        tokens, cost = load([rows_of(groups)[row] for row in rows], pairs_per_token)
        assert counted.tokens[part] == tokens and counted.rows[part] == len(rows)
        assert counted.cost[part] == pytest.approx(cost)


@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 4), st.integers(1, 500))
def test_loads_of_a_tree_count_each_token_of_a_part_once(seed, count, parts, pairs_per_token):
    """Every distinct beginning of a row of the part is one token, which meets as many as it has."""
    tokens, generator = random_rows(seed, count), np.random.default_rng(seed)
    rows = Ragged.from_rows(tokens, torch.int64)
    lengths = Lengths(rows.lengths.numpy(), PrefixOrder.from_tokens(rows))
    part_of = generator.integers(0, parts, count)
    counted = load_of(lengths, part_of, parts, CostModel(pairs_per_token))
    chosen = np.flatnonzero(generator.random(count) < 0.5)
    some = load_of(lengths.take(chosen), part_of[chosen], parts, CostModel(pairs_per_token))
    for result, members in ((counted, range(count)), (some, chosen)):
        for part in range(parts):
            beginnings = {
                tuple(tokens[row][:end])
                for row in members
                if part_of[row] == part
                for end in range(1, len(tokens[row]) + 1)
            }
            assert result.tokens[part] == len(beginnings)
            assert result.cost[part] == pytest.approx(len(beginnings) + sum(map(len, beginnings)) / pairs_per_token)


def test_forks_are_separated_where_they_share_least():
    """Two episodes of one prompt, forked late: an episode's forks stay together, whatever order they come in."""
    prompt, first, second = [1] * 10, [2] * 200, [3] * 200
    rows = Ragged.from_rows([prompt + stem + [10 + leaf] * 20 for leaf in range(4) for stem in (first, second)])
    division = balance(Lengths(rows.lengths.numpy(), PrefixOrder.from_tokens(rows)), 2)
    assert division is not None and sorted(map(sorted, division)) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_default_cost_is_that_of_a_dense_decoder_of_width_4096():
    config = {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "intermediate_size": 4096 * 8 // 3,
    }
    assert CostModel.from_config(config).pairs_per_token == pytest.approx(CostModel().pairs_per_token, rel=1e-3)


def test_costs_follow_the_shape_of_the_model():
    qwen = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    dense = CostModel.from_config({**qwen, "num_hidden_layers": 28, "intermediate_size": 3072, "vocab_size": 151936})
    by_hand = 1024 * 128 * (16 + 8 + 8 + 16) + 3 * 1024 * 3072 + 1024 * 151936 / 28
    assert dense.pairs_per_token == pytest.approx(by_hand / (2 * 16 * 128))
    experts = {**qwen, "num_hidden_layers": 28, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
    same = CostModel.from_config({**qwen, "num_hidden_layers": 28, "intermediate_size": 3072})
    assert CostModel.from_config(experts) == same, "four experts of a quarter of the width"
    assert CostModel.from_config({"text_config": {**qwen, "num_hidden_layers": 28, "intermediate_size": 3072}}) == same
    assert CostModel.from_config({"model_type": "unknown"}) == CostModel()


# -------------------------------------------------------------------------------------------------------------- balance


@given(GROUPS, st.integers(1, 6), st.booleans(), st.sampled_from([None, 2]))
def test_balance_gives_every_row_to_one_part(groups, parts, equal_count, unit):
    lengths = lengths_of(groups, unit)
    division = balance(lengths, parts, equal_count=equal_count)
    if division is None:
        assert unit is not None and len(lengths) < parts * unit
        return
    assert sorted(row for rows in division for row in rows) == list(range(len(lengths)))
    if unit is None:
        assert min(map(len, division)) >= min(1, len(lengths) // parts)
        assert not equal_count or max(map(len, division)) - min(map(len, division)) <= 1
    else:
        homes = Counter((row // unit, part) for part, rows in enumerate(division) for row in rows)
        assert len(homes) == -(-len(lengths) // unit), "a unit was parted"
    for rows in division:
        keys = [(rows_of(groups)[row][0], row) for row in rows]
        assert keys == sorted(keys), "rows of one prompt stand side by side"


@given(GROUPS, st.integers(1, 6))
def test_balance_is_never_worse_than_single_rows_or_whole_groups(groups, parts):
    lengths, model = lengths_of(groups), CostModel(100.0)
    division = balance(lengths, parts, model)
    assert division is not None
    reached = load_of(lengths, part_of_rows(division), parts, model).cost.max()
    rows = load_of(lengths, np.arange(len(lengths)), len(lengths), model).cost
    alone = load_of(lengths, part_of_rows(karmarkar_karp(rows, parts)), parts, model).cost.max()
    everything = load_of(lengths, np.zeros(len(lengths), np.int64), 1, model).cost[0]
    assert everything / parts - 1e-6 <= reached
    assert reached <= max(alone, 1.02 * everything / parts) + 1e-6


def test_groups_stay_whole_where_that_is_balanced_and_are_cut_where_it_is_not():
    whole = balance(lengths_of([(50, [10] * 4)] * 4), 2)
    assert whole is not None and sorted(map(len, whole)) == [8, 8]
    assert all(rows[0] % 4 == 0 and rows[4] % 4 == 0 for rows in whole), "two whole groups each"
    cut = balance(lengths_of([(5, [100] * 4), (5, [10] * 4)]), 2)
    assert cut is not None
    assert all(sum(row < 4 for row in rows) == 2 for rows in cut), "both get half of the heavy group"


def test_a_long_prompt_keeps_its_group_together():
    """Parting the group would cost each side the prompt again."""
    division = balance(lengths_of([(1000, [1, 1]), (500, [1, 1]), (500, [1, 1])]), 2)
    assert division == [[0, 1], [2, 3, 4, 5]] or division == [[2, 3, 4, 5], [0, 1]]


def test_a_group_is_parted_where_the_costlier_side_is_cheapest():
    parted = balance(lengths_of([(100, [100, 10, 10, 10, 10])]), 2)
    assert parted is not None and sorted(parted) == [[0], [1, 2, 3, 4]]


@given(GROUPS, st.integers(1, 6), st.integers(20, 400), st.integers(1, 6))
def test_limits_are_kept(groups, parts, max_tokens, max_rows):
    lengths = lengths_of(groups)
    division = balance(lengths, parts, equal_count=True, max_tokens=max_tokens, max_rows=max_rows)
    assume(division is not None)
    load = load_of(lengths, part_of_rows(division), parts, CostModel())
    assert load.rows.max() <= max_rows
    assert all(tokens <= max_tokens or rows <= 1 for tokens, rows in zip(load.tokens, load.rows, strict=True))


def test_metrics_compare_rows_in_order_with_the_balanced_parts():
    lengths = lengths_of([(1, [99]), (1, [99]), (1, [9]), (1, [9])])
    parts = balance(lengths, 2)
    assert in_order(4, 2) == [[0, 1], [2, 3]] and parts is not None
    metrics = balance_metrics(lengths, parts)
    assert metrics["global_seqlen/min"] == 20 and metrics["global_seqlen/max"] == 200
    assert metrics["global_seqlen/minmax_diff"] == 180 and metrics["global_seqlen/mean"] == 110
    assert metrics["global_seqlen/balanced_min"] == metrics["global_seqlen/balanced_max"] == 110
    assert metrics["global_seqlen/imbalance"] == pytest.approx(200 / 110, rel=1e-2)
    assert metrics["global_seqlen/balanced_imbalance"] == 1.0
