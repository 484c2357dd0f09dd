"""Ragged columns against lists of lists."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.data.ragged import Ragged

LISTS = st.lists(st.lists(st.integers(-9, 9), max_size=5), max_size=6)
quick = examples(40)


@quick
@given(LISTS)
def test_round_trips(rows):
    column = Ragged.from_rows(rows)
    assert column.to_lists() == rows and len(column) == len(rows)
    assert column.lengths.tolist() == [len(row) for row in rows]
    assert [column.row(i).tolist() for i in range(len(rows))] == rows
    assert Ragged.from_lengths(column.values, column.lengths).to_lists() == rows
    assert Ragged.from_padded(column.to_padded(), column.lengths).to_lists() == rows


@quick
@given(LISTS, st.integers(0, 3), st.integers(-2, 2))
def test_padding(rows, extra, pad):
    width = max((len(row) for row in rows), default=0) + extra
    column = Ragged.from_rows(rows)
    assert column.to_padded(pad, width).tolist() == [row + [pad] * (width - len(row)) for row in rows]
    assert column.mask(width).tolist() == [[i < len(row) for i in range(width)] for row in rows]
    if width > extra:
        with raises(ValueError, width - extra, width - extra - 1):
            column.to_padded(length=width - extra - 1)


@quick
@given(LISTS, st.data())
def test_select_slice_and_concat(rows, data):
    column = Ragged.from_rows(rows)
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=8)) if rows else []
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert column.select(index).to_lists() == [rows[i] for i in index]
    assert column.slice(start, stop).to_lists() == rows[start:stop]
    parts = [column.slice(0, start), column.slice(start, stop), column.slice(stop, len(rows))]
    assert Ragged.concat(parts).to_lists() == rows


def test_number_types():
    assert Ragged.from_rows([[1], [2, 3]]).values.dtype == torch.int64
    assert Ragged.from_rows([[1, 2.5]]).to_lists() == [[1.0, 2.5]]
    assert Ragged.from_rows([[], []]).values.dtype == torch.int64
    assert Ragged.from_rows([[1]], torch.float32).values.dtype == torch.float32
    assert Ragged.from_rows([torch.ones(2), torch.ones(0)], torch.int64).to_lists() == [[1, 1], []]


def test_impossible_offsets_are_refused():
    for offsets in ([0, 3], [1, 2], [0, 2, 1, 2], []):
        with raises(ValueError, "offsets"):
            Ragged(torch.zeros(2), torch.tensor(offsets, dtype=torch.int64))
    with raises(ValueError, "offsets", "torch.int32"):
        Ragged(torch.zeros(2), torch.tensor([0, 2], dtype=torch.int32))


def test_gradients_flow_through_views():
    values = torch.arange(3.0, requires_grad=True)
    Ragged(values, torch.tensor([0, 2, 3])).select([1, 1]).to_padded().sum().backward()
    assert values.grad.tolist() == [0, 0, 2]
