"""Tables that are given to a call: rows and frames with empty cells."""

import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.messages import raises

from hone.api.objects import dataset_files
from hone.errors import DataError


class Frame(dict):
    """A frame as pandas has it, as far as it is read."""

    columns = property(lambda self: list(self))

    def to_dict(self, form):
        raise AssertionError("its columns are read")


@pytest.mark.parametrize(
    "data",
    [
        Frame(q=["a", math.nan], n=[1.0, math.nan]),
        [{"q": "a", "n": 1.0}, {"q": math.nan}],
        [{"q": "a"}, {"n": 2.0}],
    ],
)
def test_empty_cells_are_null_and_no_column_is_lost(tmp_path, data):
    rows = pq.read_table(dataset_files(data, tmp_path, "train")).to_pylist()
    assert rows[0]["q"] == "a" and rows[1]["q"] is None
    assert {*rows[0]} == {"q", "n"} and (rows[0]["n"], rows[1]["n"]) in ((1.0, None), (None, 2.0))


def test_messages_and_tables_stay(tmp_path):
    asked = [{"role": "user", "content": "x"}]
    rows = [{"prompt": asked, "tags": ["a"]}, {"prompt": asked, "tags": None}]
    for data in (rows, pa.Table.from_pylist(rows)):
        assert pq.read_table(dataset_files(data, tmp_path, "train")).to_pylist() == rows


def test_two_columns_of_one_name_are_refused(tmp_path):
    with raises(DataError, "1, 1", "rename one"):
        dataset_files(Frame({1: [1], "1": [2]}), tmp_path, "train")


@pytest.mark.parametrize("data", [Frame({"frage": ["a", None, 3]}), [{"frage": "a"}, {"frage": None}, {"frage": 3}]])
def test_a_column_of_two_types_is_named_with_its_row(tmp_path, data):
    with raises(DataError, "'frage'", "row 2", 3, "astype(str)"):
        dataset_files(data, tmp_path, "train")
