"""Every operation of Batch against the same operation on a plain list of rows."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.data.batch import Batch, same_column
from hone.data.ragged import Ragged
from hone.errors import CheckpointError

ROW = st.fixed_dictionaries(
    {
        "ids": st.lists(st.integers(0, 99), max_size=4),
        "pairs": st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)).map(list), max_size=3),
        "score": st.lists(st.integers(-5, 5).map(float), min_size=2, max_size=2),
        "uid": st.sampled_from(["a", "b", "c"]),
    }
)
ROWS = st.lists(ROW, max_size=7)
quick = examples(40)


def batch_of(rows, **meta):
    pairs = [torch.tensor(row["pairs"], dtype=torch.int64).reshape(-1, 2) for row in rows]
    return Batch(
        {
            "ids": Ragged.from_rows([row["ids"] for row in rows], torch.int64),
            "pairs": Ragged.from_rows(pairs)
            if rows
            else Ragged(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)),
            "score": torch.tensor([row["score"] for row in rows]).reshape(len(rows), 2),
            "uid": [row["uid"] for row in rows],
        },
        **meta,
    )


def rows_of(batch):
    columns = {
        name: column.to_lists()
        if isinstance(column, Ragged)
        else column.tolist()
        if torch.is_tensor(column)
        else column
        for name, column in ((name, batch[name]) for name in batch.names())
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(len(batch))]


@quick
@given(ROWS)
def test_rows_survive_the_columns(rows):
    assert rows_of(batch_of(rows)) == rows
    assert len(batch_of(rows)) == len(rows)


@quick
@given(ROWS, st.data())
def test_reorder_takes_rows_in_order(rows, data):
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=9)) if rows else []
    batch = batch_of(rows, step=3).reorder(index)
    assert rows_of(batch) == [rows[i] for i in index]
    assert batch.meta == {"step": 3}


@quick
@given(ROWS, st.data())
def test_slice_is_the_list_slice(rows, data):
    start = data.draw(st.integers(0, len(rows)))
    stop = data.draw(st.integers(start, len(rows)))
    assert rows_of(batch_of(rows).slice(start, stop)) == rows[start:stop]


@quick
@given(ROWS, st.integers(1, 9))
def test_split_and_concat_are_inverse(rows, size):
    batch = batch_of(rows, step=1)
    parts = batch.split(size)
    assert [rows_of(part) for part in parts] == [rows[i : i + size] for i in range(0, len(rows), size)]
    if parts:
        joined = Batch.concat(parts)
        assert rows_of(joined) == rows and joined.meta == {"step": 1}


@quick
@given(ROWS, st.integers(1, 9))
def test_chunk_gives_even_parts_that_concat_back(rows, count):
    parts = batch_of(rows).chunk(count)
    sizes = [len(part) for part in parts]
    assert len(parts) == count and max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)
    assert rows_of(Batch.concat(parts)) == rows


@quick
@given(ROWS, st.integers(0, 3))
def test_repeat(rows, times):
    batch = batch_of(rows)
    assert rows_of(batch.repeat(times)) == [row for row in rows for _ in range(times)]
    assert rows_of(batch.repeat(times, interleave=False)) == rows * times


@quick
@given(ROWS)
def test_select_rename_union_divide_and_rejoin_columns(rows):
    batch = batch_of(rows, step=2)
    left, right = batch.select("ids", "uid"), batch.select("score", "pairs", "uid")
    assert rows_of(left) == [{"ids": row["ids"], "uid": row["uid"]} for row in rows]
    assert rows_of(left.union(right)) == rows
    there = batch.rename({"ids": "tokens"})
    assert "ids" not in there and rows_of(there.rename({"tokens": "ids"})) == rows
    assert batch.rename({"ids": "uid", "uid": "ids"}).names() == ["uid", "pairs", "score", "ids"]


@examples(25)
@given(rows=ROWS)
def test_saved_batches_load_bit_for_bit(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("batch")
    batch = batch_of(rows, step=7, note={"k": [1, None, "x"]}).with_columns(
        half=torch.rand(len(rows)).to(torch.bfloat16), flag=torch.rand(len(rows)) > 0.5
    )
    batch = batch.with_columns(again=batch["ids"])  # columns that share storage
    batch.save(path)
    loaded = Batch.load(path)
    assert loaded.names() == batch.names() and loaded.meta == batch.meta
    assert all(same_column(loaded[name], batch[name]) for name in batch.names())


def test_views_of_a_batch_can_be_saved(tmp_path):
    batch = batch_of([{"ids": [i], "pairs": [], "score": [i, i], "uid": "a"} for i in range(5)])
    batch.slice(1, 3).save(tmp_path)
    assert rows_of(Batch.load(tmp_path)) == rows_of(batch)[1:3]


@pytest.mark.parametrize("value", [(1, 2), {1: "x"}, object(), {1, 2}, torch.zeros(1)])
def test_objects_that_json_would_change_are_refused(tmp_path, value):
    with raises(TypeError, "row 1", "'thing'"):
        Batch({"thing": ["fine", value]}).save(tmp_path)
    with raises(TypeError, "'thing'"):
        Batch({"ok": [1]}, thing=value).save(tmp_path)
    assert not list(tmp_path.iterdir())


def test_nan_survives_in_objects_and_tensors(tmp_path):
    batch = Batch({"x": torch.tensor([math.nan]), "y": [math.nan]})
    batch.save(tmp_path)
    loaded = Batch.load(tmp_path)
    assert math.isnan(loaded["y"][0]) and same_column(loaded["x"], batch["x"])


def test_damaged_files_are_reported_not_unpickled(tmp_path):
    with raises(CheckpointError, "batch.json", "tensors.safetensors", where=str(tmp_path)):
        Batch.load(tmp_path)
    Batch({"x": torch.zeros(2)}).save(tmp_path)
    (tmp_path / "tensors.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CheckpointError):
        Batch.load(tmp_path)
    Batch({"x": torch.zeros(2)}).save(tmp_path)
    (tmp_path / "batch.json").write_text(json.dumps({"columns": {"x": {"kind": "ragged"}}, "meta": {}}))
    with pytest.raises(CheckpointError):
        Batch.load(tmp_path)


def test_a_path_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with raises(CheckpointError, where=str(tmp_path / "file" / "below")):
        Batch({"x": [1]}).save(tmp_path / "file" / "below")


def test_union_refuses_what_conflicts():
    batch = Batch({"x": torch.tensor([1.0, math.nan]), "r": Ragged.from_rows([[1], [2, 3]])}, step=1)
    assert batch.union(batch).names() == ["x", "r"]
    for other, word in (
        (Batch({"x": torch.tensor([1.0, 2.0])}), "'x'"),
        (Batch({"x": [1.0, 2.0]}), "'x'"),
        (Batch({"r": Ragged.from_rows([[1, 2], [3]])}), "'r'"),
        (Batch({"y": [1]}), 2),
        (Batch({"y": [1, 2]}, step=2), "'step'"),
    ):
        with raises(ValueError, word):
            batch.union(other)


def test_concat_refuses_what_does_not_match():
    batch = Batch({"x": torch.zeros(2, 3)}, step=1)
    for other, word in (
        (Batch({"y": torch.zeros(2, 3)}, step=1), "['x'] and ['y']"),
        (Batch({"x": torch.zeros(2, 4)}, step=1), "'x'"),
        (Batch({"x": torch.zeros(2, 3, dtype=torch.int64)}, step=1), "'x'"),
        (Batch({"x": [1, 2]}, step=1), "'x'"),
        (Batch({"x": torch.zeros(2, 3)}, step=2), "'step'"),
    ):
        with raises(ValueError, word):
            Batch.concat([batch, other])
    with pytest.raises(ValueError):
        Batch.concat([])


def test_wrong_arguments_are_errors():
    batch = Batch({"x": [1, 2, 3], "y": [1, 2, 3]})
    with raises(ValueError, "{'x': 1, 'y': 2}"):
        Batch({"x": [1], "y": [1, 2]})
    with raises(KeyError, "'z'", "['x', 'y']"):
        batch.select("z")
    with raises(KeyError, "'z'"):
        batch.rename({"z": "w"})
    with raises(ValueError, "y"):
        batch.rename({"x": "y"})
    for rows in ([3], [-1]):
        with pytest.raises(IndexError):
            batch.reorder(rows)
    for call in (lambda: batch.slice(2, 1), lambda: batch.slice(0, 4)):
        with pytest.raises(IndexError):
            call()
    for call in (
        lambda: batch.split(0),
        lambda: batch.chunk(0),
        lambda: batch.repeat(-1),
    ):
        with pytest.raises(ValueError):
            call()
    for name, method in (("x", batch.tensor), ("x", batch.ragged)):
        with raises(TypeError, "'x'", "list"):
            method(name)
    with raises(TypeError, "names()", "split(1)"):
        list(batch)


def test_operations_leave_the_original_alone():
    rows = [{"ids": [i], "pairs": [[i, i]], "score": [i, i], "uid": "a"} for i in range(3)]
    batch = batch_of(rows, step=1)
    batch.with_columns(extra=[1, 2, 3]), batch.rename({"ids": "x"}), batch.repeat(2), batch.union(batch)
    assert rows_of(batch) == rows and batch.meta == {"step": 1}
