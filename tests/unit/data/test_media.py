"""Rows with images, video or sound: where they are seen, and that no reader of text takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.messages import raises
from support.preflight import write_rows
from typer.testing import CliRunner

from hone.cli.main import app
from hone.data import checks, media
from hone.data.conversations import ConversationDataset
from hone.data.files import EVERY_COLUMN, Row, read_rows
from hone.data.media import MediaError, media_of
from hone.data.preferences import PreferenceDataset
from hone.data.prompts import PromptDataset
from hone.errors import DataError
from hone.trainers.evaluation import EvaluationRequest, run_evaluation

IMAGE = {"bytes": b"\x89PNG", "path": None}
ASKED = [{"role": "user", "content": "<image> What is it?"}]


def parts(*types: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": kind, "text": "x"} for kind in types]}]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"prompt": "text", "images": None, "videos": [], "audios": ""}, {}),
        ({"prompt": ASKED}, {}),  # a mark alone is text
        ({"prompt": parts("text", "text")}, {}),
        ({"image": "docker.io/python:3.12"}, {}),
        ({"image": ["python:3.12"]}, {}),
        ({"prompt": ASKED, "images": [IMAGE]}, {"image": 1}),
        ({"images": [IMAGE, IMAGE], "videos": ["a.mp4"]}, {"image": 2, "video": 1}),
        ({"images": IMAGE}, {"image": 1}),
        ({"image": IMAGE}, {"image": 1}),
        ({"audios": b"RIFF"}, {"audio": 1}),
        ({"prompt": parts("text", "image_url"), "messages": parts("input_audio")}, {"image": 1, "audio": 1}),
        ({"prompt": parts("image", "text", "image"), "images": [IMAGE, IMAGE]}, {"image": 2}),
        ({"prompt": np.array(parts("video"), dtype=object)}, {"video": 1}),
    ],
)
def test_media_of_a_row(values: dict[str, Any], expected: dict[str, int]) -> None:
    assert media_of(values) == expected


def test_all_rows_are_counted_in_one_finding() -> None:
    rows = [Row(f"a:{n}", f"a.jsonl, row {n}", {"prompt": "x"}) for n in range(4)]
    assert list(checks.media(rows)) == []
    rows[1].values["images"], rows[3].values["prompt"] = [IMAGE, IMAGE], parts("image")
    (finding,) = checks.media(rows)
    assert finding.stops and finding.error.code == media.CODE and finding.error.where == "a.jsonl, row 1"
    assert "2 of 4" in finding.error.what and "3 images" in finding.error.what


def test_kinds_that_are_not_refused_do_not_count() -> None:
    rows = [Row("a:0", "a, row 0", {"images": [IMAGE]}), Row("a:1", "a, row 1", {"videos": ["a.mp4"]})]
    (finding,) = checks.media(rows, ("video", "audio"))
    assert finding.error.where == "a, row 1" and "1 of 2" in finding.error.what


@pytest.mark.parametrize(
    ("row", "looked_at"),
    [
        ({"prompt": [{"role": "user", "content": "hi"}], "other": [1.0]}, False),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, True),
        ({"prompt": "hi", "nested": [[{"role": "user", "content": "hi"}]]}, True),
        ({"prompt": "hi", "image": "no picture"}, True),
    ],
)
def test_rows_are_looked_at_where_the_types_of_a_file_leave_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, Any], looked_at: bool
) -> None:
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "rows.parquet")
    seen: list[str] = []
    monkeypatch.setattr(media, "refuse_media", lambda *of_row: seen.append(of_row[1]))
    read_rows(tmp_path / "rows.parquet", required=("prompt",), optional=EVERY_COLUMN, refused=media.KINDS)
    assert bool(seen) == looked_at


def test_the_reader_stops_at_the_first_row_with_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.parquet"
    images = [[IMAGE] if row >= 100 else None for row in range(6000)]
    pq.write_table(pa.table({"prompt": ["x"] * 6000, "images": images}), file)
    seen: list[str] = []
    original = media.refuse_media
    monkeypatch.setattr(media, "refuse_media", lambda *row: (seen.append(row[1]), original(*row)))
    with raises(MediaError, "1 image", where=f"{file}, row 100"):
        read_rows(file, required=("prompt",), refused=media.KINDS)
    assert len(seen) == 101
    assert len(read_rows(file, required=("prompt",))) == 6000
    rows = read_rows(file, required=("prompt",), refused=media.KINDS, max_rows=100)
    assert len(rows) == 100 and rows[0].values == {"prompt": "x"}


def prompts(file: Path, tokenizer: Any) -> object:
    return PromptDataset(
        file, tokenizer, prompt_key="prompt", reward_fn_key="data_source", max_prompt_length=64, truncation="error"
    )


def conversations(file: Path, tokenizer: Any) -> object:
    return ConversationDataset(file, tokenizer, messages_key="messages", max_length=64, truncation="error")


def preferences(file: Path, tokenizer: Any) -> object:
    return PreferenceDataset(file, tokenizer, max_length=64, truncation="error")


ANSWER = {"role": "assistant", "content": "A cat."}


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (prompts, {"prompt": ASKED}),
        (conversations, {"messages": [*ASKED, ANSWER]}),
        (preferences, {"prompt": ASKED, "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "A dog."}]}),
    ],
)
def test_no_dataset_of_a_program_reads_them(
    dataset: Callable[[Path, Any], Any], text: dict[str, Any], tmp_path: Path, tokenizer: Any
) -> None:
    file = write_rows(tmp_path / "text.jsonl", [text, text | {"images": None}])
    assert len(dataset(file, tokenizer)) == 2
    column = write_rows(tmp_path / "column.jsonl", [text, text | {"images": ["cat.png"]}])
    with raises(DataError, "1 image", where=f"{column}, row 1"):
        dataset(column, tokenizer)
    (name, value) = next(iter(text.items()))
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "cat.png"}}]}]
    in_parts = write_rows(tmp_path / "parts.jsonl", [text, text | {name: [*image, *value[1:]]}])
    with raises(DataError, "1 image", where=f"{in_parts}, row 1"):
        dataset(in_parts, tokenizer)


def test_evaluation_stops_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_directory: Path
) -> None:
    file = write_rows(tmp_path / "val.jsonl", [{"prompt": ASKED, "images": ["cat.png"]}])
    monkeypatch.setattr("hone.trainers.evaluation.find_actor", lambda model: tokenizer_directory)
    monkeypatch.setattr("hone.trainers.evaluation.load_policy", lambda *args, **kwargs: pytest.fail("loaded"))
    with raises(DataError, "1 image", where=f"{file}, row 0"):
        run_evaluation(EvaluationRequest(str(tokenizer_directory), [str(file)]))


def test_data_check_stops(tmp_path: Path) -> None:
    row = {"prompt": ASKED, "data_source": "exact_match", "reward_model": {"ground_truth": "a cat"}}
    sound = write_rows(tmp_path / "text.jsonl", [row | {"extra_info": {"n": n}} for n in range(3)])
    assert CliRunner().invoke(app, ["data", "check", str(sound)]).exit_code == 0
    file = write_rows(tmp_path / "train.jsonl", [row, row | {"videos": ["cat.mp4"]}])
    result = CliRunner().invoke(app, ["data", "check", str(file)])
    assert result.exit_code == 2
    assert media.CODE in result.output and "1 of 2" in result.output
