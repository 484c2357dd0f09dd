"""Every row goes to one rank and comes back to its place, whatever the ranks, groups and repetitions."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.messages import raises

from hone.cluster.dispatch import RowGroups
from hone.cluster.group import Partition, balanced
from hone.data.balance import Lengths


def lengths_of(sizes: list[int], group: int) -> Lengths:
    return Lengths.from_uids(
        torch.full((len(sizes),), 4), torch.tensor(sizes), [f"g{row // group}" for row in range(len(sizes))]
    )


def returned(partition: Partition, count: int) -> list[int]:
    """What each row gets back when every rank answers with the rows that it was sent."""
    rank, place = partition.sources
    assert len(rank) == count
    return [int(partition.rows[r][p]) for r, p in zip(rank, place, strict=True)]


@given(count=st.integers(1, 40), ranks=st.integers(1, 9), equal=st.booleans())
def test_rows_in_order_come_back_to_their_places(count, ranks, equal):
    partition = Partition.filled(Partition.chunks(count, ranks).rows, equal=equal)
    sizes = [len(rows) for rows in partition.rows]
    assert min(sizes) >= 1 and (not equal or len(set(sizes)) == 1)
    assert sum(sizes) - sum(partition.padded) == count
    assert returned(partition, count) == list(range(count))


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=24),
    group=st.integers(1, 4),
    ranks=st.integers(1, 6),
    cuts=st.integers(1, 3),
    epochs=st.integers(1, 2),
    equal=st.booleans(),
    by_work=st.booleans(),
)
def test_every_mini_batch_is_divided_and_keeps_its_rows(sizes, group, ranks, cuts, epochs, equal, by_work):
    minis = [part.tolist() for part in np.array_split(np.arange(len(sizes)), cuts) if len(part)]
    groups = RowGroups(minis * epochs)
    partition = balanced(lengths_of(sizes, group), ranks, groups=groups, equal=equal, by_work=by_work)
    assert returned(partition, len(sizes)) == list(range(len(sizes)))
    local = partition.local(groups)
    for number, mini in enumerate(groups):
        parts = [[int(partition.rows[rank][row]) for row in local[rank].groups[number]] for rank in range(ranks)]
        assert sorted(row for part in parts for row in part) == sorted(mini), "the ranks' rows are the mini-batch"
        if len(mini) >= ranks:
            assert min(map(len, parts)) >= 1, "no rank is idle while another has several rows"


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=12),
    ranks=st.integers(1, 6),
    by_work=st.booleans(),
)
def test_the_sides_of_a_pair_go_to_one_rank(sizes, ranks, by_work):
    lengths = torch.tensor(sizes).flatten()
    units = torch.arange(len(sizes)).repeat_interleave(2)
    pairs = Lengths.from_uids(torch.full_like(lengths, 4), lengths, units.tolist(), units)
    partition = balanced(pairs, ranks, groups=RowGroups([range(len(lengths))]), by_work=by_work)
    assert returned(partition, len(lengths)) == list(range(len(lengths)))
    rank_of = partition.sources[0]
    assert (rank_of[0::2] == rank_of[1::2]).all()
    assert len(set(rank_of.tolist())) == min(ranks, len(sizes)), "no rank is idle while another has several pairs"


def test_ranks_get_equal_work_and_not_equal_counts():
    sizes = [100, 10, 10, 10, 10, 10, 10, 10, 10, 10, 10]
    rows = balanced(lengths_of(sizes, 1), 2).rows
    tokens = [sum(sizes[row] + 4 for row in part) for part in rows]
    in_order = balanced(lengths_of(sizes, 1), 2, by_work=False).rows
    assert max(tokens) <= 126 < sum(sizes[row] + 4 for row in in_order[0])


def test_rows_that_are_missing_or_repeated_are_an_error():
    with raises(ValueError, "2 rows"):
        assert Partition([np.array([0, 2])], [0]).sources
    with pytest.raises(ValueError):
        Partition.filled([np.array([], np.int64)], equal=False)
