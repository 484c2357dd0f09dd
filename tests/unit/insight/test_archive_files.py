"""Files of the rollout archive: written, read back, refused."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises

from hone.errors import HoneError
from hone.insight import redaction
from hone.insight.archive.read import open_archive, require_archive, table_records
from hone.insight.archive.schema import COLUMNS, FLOATS, IDS, INT, INTS, JSON, NUMBER, VERSION_KEY
from hone.insight.archive.write import step_file, to_table, write_step, write_vocabulary

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = {
    INT: st.integers(-1, 2**31 - 1),
    NUMBER: st.floats(allow_nan=False),
    IDS: st.lists(st.integers(-(2**62), 2**31 - 1), max_size=5),
    INTS: st.lists(st.integers(-1, 2**31 - 1), max_size=5),
    FLOATS: st.lists(st.floats(width=32, allow_nan=False), max_size=5),
    JSON: st.recursive(
        TEXTS | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=5,
    ),
}


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    values = {column.name: VALUES.get(column.kind, TEXTS) for column in COLUMNS}
    return {c.name: draw(values[c.name] if c.required else st.none() | values[c.name]) for c in COLUMNS}


def row(uid: str, index: int = 0, **values: Any) -> dict[str, Any]:
    return {"step": 1, "uid": uid, "index": index, "part": 0, "fate": "trained", "text": "", **values}


@given(st.lists(rows(), max_size=4))
@examples(30)
def test_records_are_read_as_they_were_written(records: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_step(Path(folder), 3, to_table(records))
        archive = open_archive(Path(folder))
        assert archive.steps() == [3] and archive.complete(3)
        assert list(archive.records(3)) == records
        for uid in {record["uid"] for record in records}:
            chosen = [{"score": r["score"], "terms": r["terms"]} for r in records if r["uid"] == uid]
            assert list(archive.records(3, ["score", "terms"], uid)) == chosen


def test_only_the_named_columns_are_read(tmp_path: Path) -> None:
    write_step(tmp_path, 1, to_table([row("a", response_ids=[1, 2])]))
    assert open_archive(tmp_path).table(1, ["response_ids", "uid"]).to_pydict() == {
        "response_ids": [[1, 2]],
        "uid": ["a"],
    }


def test_steps_in_order_and_a_run_directory(tmp_path: Path) -> None:
    for step in (10, 2):
        write_step(tmp_path / "rollouts", step, to_table([row("a", step=step)]), rows=7)
    write_vocabulary(tmp_path / "rollouts", ["a", "\ud800", "c"])
    archive = open_archive(tmp_path)
    assert archive.steps() == [2, 10] and not archive.complete(2)
    assert archive.vocabulary() == ["a", "\ufffd", "c"]
    assert open_archive(tmp_path / "validation").vocabulary() == archive.vocabulary()
    assert open_archive(tmp_path / "empty").steps() == [] and open_archive(tmp_path / "a" / "b").vocabulary() is None


@pytest.mark.parametrize(
    ("record", "name"), [({"other": 1}, "other"), ({"uid": None}, "uid"), ({"text": None}, "text")]
)
def test_rows_that_the_archive_cannot_hold(record: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        to_table([{**row("a"), **record}])


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with raises(HoneError, str(tmp_path), "trainer.rollout_dump_freq=1"):
        require_archive(tmp_path)
    write_step(tmp_path, 4, to_table([row("a")]))
    with raises(HoneError, "step 9", "--step 4"):
        list(open_archive(tmp_path).records(9))
    table = pq.read_table(step_file(tmp_path, 4))
    pq.write_table(table.replace_schema_metadata({VERSION_KEY: "99"}), step_file(tmp_path, 4))
    with raises(HoneError, "99", str(step_file(tmp_path, 4))):
        open_archive(tmp_path).complete(4)
    pq.write_table(table.drop_columns(["rollout_log_probs"]), step_file(tmp_path, 4))
    with raises(HoneError, "rollout_log_probs", code="E-runs"):
        list(open_archive(tmp_path).records(4))
    step_file(tmp_path, 4).write_bytes(b"PAR1 half a file")
    with raises(HoneError, str(step_file(tmp_path, 4))):
        list(require_archive(tmp_path).records(4))
    write_step(tmp_path, 5, to_table([row(f"train:{number}", response_ids=[number] * 50) for number in range(50)]))
    data = bytearray(step_file(tmp_path, 5).read_bytes())
    data[4:400] = bytes(396)  # pages, not the footer
    step_file(tmp_path, 5).write_bytes(data)
    with raises(HoneError, str(step_file(tmp_path, 5)), code="E-runs"):
        list(open_archive(tmp_path).records(5))


def test_a_file_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_step(tmp_path, 1, to_table([row("a")]))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with raises(HoneError, "the disk is full"):
        write_step(tmp_path, 1, to_table([row("b")]))
    assert [file.name for file in tmp_path.iterdir()] == ["step_1.parquet"]
    assert next(open_archive(tmp_path).records(1, ["uid"])) == {"uid": "a"}


TOKEN = "hf_aBcDeFgHiJkLmNoPqRsTuVwXyZ"


@pytest.mark.parametrize(
    ("record", "keeps_ids"),
    [
        ({"text": f"the token is {TOKEN}."}, False),
        ({"prompt": TOKEN}, False),
        ({"messages": [{"role": "user", "content": f"use {TOKEN}"}]}, False),
        ({"episode": {"tool_calls": [{"result": f'"{TOKEN}"', "seconds": 0.5}]}}, False),
        ({"episode": {"messages": [{"content": "-----BEGIN PRIVATE KEY-----\nabc\ndef"}]}}, False),
        ({"extra": {"judge": f"saw {TOKEN}"}}, True),
        ({"error": f"401 for {TOKEN}"}, True),
        ({"text": "password=abc and sk-1, prompt_key: hf_short"}, True),
    ],
)
def test_credentials_are_hidden_and_so_are_their_tokens(record: dict[str, Any], keeps_ids: bool) -> None:
    ids = {"prompt_ids": [1], "response_ids": [2, 3], "response_mask": [1, 1]}
    rows = [row("a", 0, **ids), row("a", 1, **ids, **record)]
    clean, shown = table_records(to_table(rows))
    assert TOKEN not in json.dumps(shown) and "abc\\ndef" not in json.dumps(shown)
    assert (clean["prompt_ids"], clean["response_ids"]) == ([1], [2, 3])
    assert (shown["prompt_ids"], shown["response_ids"]) == (([1], [2, 3]) if keeps_ids else (None, None))
    assert shown["response_mask"] == [1, 1]
    (name,) = record
    same = json.loads(json.dumps(record[name]).replace(TOKEN, "<redacted>"))
    assert shown[name] == same or name == "episode"


def test_variables_of_the_configuration_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_variables", {})
    redaction.hide_variables({"SEARCH_KEY": "plain-but-secret"})
    (shown,) = table_records(to_table([row("a", text="it is plain-but-secret", response_ids=[1])]))
    assert (shown["text"], shown["response_ids"]) == ("it is ${oc.env:SEARCH_KEY}", None)
