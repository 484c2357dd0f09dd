"""The tree of prefixes as an order of rows, against comparing every pair of rows."""

import itertools
import random

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.prefix_trees import random_rows

from hone.data.prefixes import PrefixOrder, PrefixSet
from hone.data.ragged import Ragged


def with_images(rows: list[list[int]]) -> list[list[int]]:
    """Rows in which every other id is an image's; these differ in their high bits alone."""
    return [[token if token % 2 else -(token << 40) - 1 for token in row] for row in rows]


TEXTS = st.builds(
    random_rows, st.integers(0, 10**6), st.integers(1, 14), longest=st.just(6), vocabulary=st.sampled_from([2, 50])
)
ROWS = st.one_of(TEXTS, TEXTS.map(with_images))


def common(left: list[int], right: list[int]) -> int:
    """Tokens at the beginning of both rows, compared one by one."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def tree_of(rows: list[list[int]]) -> PrefixOrder:
    return PrefixOrder.from_tokens(Ragged.from_rows(rows, torch.int64))


@given(ROWS)
def test_a_row_shares_its_longest_prefix_with_the_row_before_it(rows):
    tree = tree_of(rows)
    assert sorted(tree.order) == list(range(len(rows))) and tree.shared[0] == 0
    placed = [rows[row] for row in tree.order]
    for right in range(1, len(rows)):
        pairs = [common(placed[left], placed[right]) for left in range(right)]
        assert tree.shared[right] == max(pairs)
        assert tree.between(np.arange(right), np.full(right, right)).tolist() == pairs


@given(ROWS, st.randoms(use_true_random=False))
def test_the_order_of_some_rows_is_that_of_their_tree(rows, draw):
    chosen = draw.sample(range(len(rows)), draw.randint(1, len(rows)))
    part = tree_of(rows).take(np.asarray(chosen))
    placed = [rows[chosen[row]] for row in part.order]
    assert sorted(part.order) == list(range(len(chosen)))
    expected = [0, *(common(left, right) for left, right in itertools.pairwise(placed))]
    assert part.shared.tolist() == expected
    distinct = {tuple(row[:end]) for row in placed for end in range(1, len(row) + 1)}
    assert sum(map(len, placed)) - int(part.shared.sum()) == len(distinct)


@given(ROWS, st.integers(1, 5))
def test_where_a_row_is_cut_into_columns_changes_nothing(rows, seed):
    draw, tree = random.Random(seed), tree_of(rows)
    cuts = [draw.randint(0, len(row)) for row in rows]
    columns = [
        [row[:cut] for row, cut in zip(rows, cuts, strict=True)],
        [row[c:] for row, c in zip(rows, cuts, strict=True)],
    ]
    cut = PrefixOrder.from_tokens(*(Ragged.from_rows(column, torch.int64) for column in columns))
    assert np.array_equal(cut.order, tree.order) and np.array_equal(cut.shared, tree.shared)


@given(ROWS)
def test_branches_with_the_longest_rows_come_first(rows):
    tree = tree_of(rows)
    lengths = [len(rows[row]) for row in tree.order]
    starts = [place for place in range(len(rows)) if tree.shared[place] == 0]
    trees = [max(lengths[a:b]) for a, b in itertools.pairwise([*starts, len(rows)])]
    assert trees == sorted(trees, reverse=True)


@given(ROWS, st.randoms(use_true_random=False))
def test_a_set_counts_the_tokens_that_are_new(rows, draw):
    packed, seen = PrefixSet(tree_of(rows), [len(row) for row in rows]), set()
    for row in draw.sample(range(len(rows)), len(rows)):
        beginnings = {tuple(rows[row][:end]) for end in range(1, len(rows[row]) + 1)}
        assert packed.add(row) == len(beginnings - seen)
        seen |= beginnings


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), min_size=1, max_size=12))
def test_groups_share_what_their_shortest_neighbour_has(rows):
    groups, sizes = [group for group, _ in rows], [size for _, size in rows]
    tree = PrefixOrder.from_groups(groups, torch.tensor(sizes))
    placed = [rows[row] for row in tree.order]
    firsts = list(dict.fromkeys(groups))
    assert [firsts.index(group) for group, _ in placed] == sorted(firsts.index(group) for group in groups)
    for (group, size), (other, following), shared in zip(placed, placed[1:], tree.shared[1:], strict=False):
        assert shared == (min(size, following) if group == other else 0)
