"""Arrow files and directories in the layout of `datasets.Dataset.save_to_disk`, and rows without a data source."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from hone.data.files import NO_SOURCE, read_all, read_rows
from hone.data.prompts import scored_rows
from hone.errors import DataError

ROWS = [{"prompt": f"p{number}", "n": number} for number in range(5)]


def write_stream(path: Path, rows: list[dict[str, object]]) -> Path:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def save_to_disk(folder: Path) -> Path:
    folder.mkdir(parents=True)
    parts = [write_stream(folder / f"data-0000{n}-of-00002.arrow", rows) for n, rows in enumerate((ROWS[:3], ROWS[3:]))]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": part.name} for part in parts]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_stream_and_a_file_are_read(tmp_path: Path) -> None:
    stream = write_stream(tmp_path / "a.arrow", ROWS)
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    for path in (stream, tmp_path / "b.arrow"):
        assert [row.values for row in read_rows(path, required=("prompt",), optional=("n",))] == ROWS
        assert [row.values["n"] for row in read_rows(path, required=("n",), max_rows=2)] == [0, 1]


def test_a_saved_dataset_is_read_in_order(tmp_path: Path) -> None:
    folder = save_to_disk(tmp_path / "saved")
    assert [row.values["n"] for row in read_all(folder)] == [0, 1, 2, 3, 4]
    assert len({row.uid for row in read_all(folder)}) == 5


def test_a_saved_dictionary_names_its_splits(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "saved/train")
    (tmp_path / "saved/dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "saved", required=("prompt",))
    assert str(tmp_path / "saved/train") in caught.value.fix


@pytest.mark.parametrize("content", [b"", b"not arrow at all"])
def test_a_damaged_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.arrow"
    path.write_bytes(content)
    with pytest.raises(DataError):
        read_rows(path, required=("prompt",))


def test_missing_columns_take_their_default(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "data_source": "math"}\n')
    rows = read_rows(path, required=("prompt",), defaults={"data_source": NO_SOURCE})
    assert [row.values["data_source"] for row in rows] == [NO_SOURCE, "math"]
    assert [row.sample.data_source for row in scored_rows(path, reward_fn_key="data_source", limit=5)] == [
        NO_SOURCE,
        "math",
    ]


@pytest.mark.parametrize(
    ("columns", "required", "word"),
    [({"instruction": "q"}, "messages", "hone data convert"), ({"query": "q"}, "prompt", "data.prompt_key=")],
)
def test_a_missing_column_names_the_way_out(
    tmp_path: Path, columns: dict[str, object], required: str, word: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(columns) + "\n")
    with pytest.raises(DataError) as caught:
        read_rows(path, required=(required,))
    assert word in caught.value.fix
