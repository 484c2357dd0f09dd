"""Rows that are kept apart: splits by template, prompts of another script, and pairs whose answers differ in form alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.messages import raises
from typer.testing import CliRunner

from hone.apps.lab.data.inspection import clean_files, split_files, template_of
from hone.cli.main import app
from hone.data import checks
from hone.data.files import Row
from hone.errors import ConfigError, DataError

NAMES, THINGS = ("Ann", "Bob", "Cid", "Dora"), ("plums", "pens", "maps", "cups", "hats")


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    texts = [f"{name} has {n} {thing}." for name in NAMES for n, thing in enumerate(THINGS, 3)]
    return write(
        tmp_path / "rows.jsonl",
        [{"prompt": [{"role": "user", "content": t}], "extra_info": {"kind": len(t) % 4}} for t in texts],
    )


def parts_of(out: Path) -> list[list[dict]]:
    return [
        [json.loads(line) for line in (out / f"{name}.jsonl").read_text().splitlines()] for name in ("train", "val")
    ]


@pytest.mark.parametrize("by", ["template", "prompt", "extra_info.kind"])
def test_no_group_is_in_both_parts(tasks: str, tmp_path: Path, by: str):
    counted = split_files([tasks], tmp_path / "out", share=0.25, by=by)
    parts = parts_of(tmp_path / "out")

    def group(row: dict) -> object:
        text = row["prompt"][0]["content"]
        return row["extra_info"]["kind"] if by == "extra_info.kind" else text if by == "prompt" else text.split()[-1]

    groups = [{group(row) for row in part} for part in parts]
    assert not groups[0] & groups[1] and all(groups)
    assert (counted.train, counted.val) == tuple(map(len, parts)) and sum(map(len, parts)) == 20
    assert (counted.train_groups, counted.val_groups) == tuple(map(len, groups))
    again = split_files([tasks], tmp_path / "again", share=0.25, by=by)
    assert again == counted and parts_of(tmp_path / "again") == parts


def test_a_split_is_of_about_the_share(tmp_path: Path):
    file = write(tmp_path / "rows.jsonl", [{"prompt": f"{word} {'x' * word}"} for word in range(400)])
    for share in (0.05, 0.5, 0.9):
        assert abs(split_files([file], tmp_path / str(share), share=share, by="prompt").val - 400 * share) <= 1


def test_parquet_stays_what_it_is(tmp_path: Path):
    table = pa.table(
        {
            "prompt": [[{"role": "user", "content": f"{n} {'x' * n}"}] for n in range(20)],
            "image": [{"bytes": bytes([n, 255]), "path": None} for n in range(20)],
            "small": pa.array(range(20), pa.int8()),
            "when": pa.array(range(20), pa.timestamp("us")),
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    split_files([str(tmp_path / "rows.parquet")], tmp_path / "out", share=0.3, by="prompt")
    parts = [pq.read_table(tmp_path / f"out/{name}.parquet") for name in ("train", "val")]
    whole = pa.concat_tables(parts).sort_by("small")
    assert whole.schema == table.schema and whole.equals(table)
    with raises(DataError, "bytes", "--out FILE.parquet"):
        clean_files(
            [str(tmp_path / "rows.parquet")], tmp_path / "c.jsonl", tmp_path / "r.jsonl", messages_key="m", limit=9
        )


@pytest.mark.parametrize(
    ("rows", "code"),
    [
        ([{"prompt": [{"role": "user", "content": [{"type": "text", "text": f"Add {n} to {'x' * n}"}]}]} for n in range(9)], None),
        ([{"prompt": [n, n + 1]} for n in range(9)], None),
        ([{"prompt": f"{n} {'x' * n}"} for n in range(9)] + [{"prompt": None}], "R42"),
        ([{"question": f"{n} {'x' * n}"} for n in range(9)], "R42"),
    ],
)  # fmt: skip
def test_prompts_of_every_form(tmp_path: Path, rows: list[dict], code: str | None):
    file = write(tmp_path / "rows.jsonl", rows)
    by = "prompt" if isinstance(rows[0].get("prompt"), list) and isinstance(rows[0]["prompt"][0], int) else "template"
    if code is not None:
        with raises(DataError, "prompt", "--prompt-key", code=code):
            split_files([file], tmp_path / "out", share=0.3, by=by)
        return
    counted = split_files([file], tmp_path / "out", share=0.3, by=by)
    assert (counted.train, counted.val) == (6, 3) and counted.train_groups == 6


def test_nothing_is_overwritten(tasks: str, tmp_path: Path):
    split_files([tasks], tmp_path / "out", share=0.3)
    before = (tmp_path / "out/train.jsonl").read_bytes()
    with raises(ConfigError, "train.jsonl", where="--out"):
        split_files([str(tmp_path / "out/train.jsonl")], tmp_path / "out", share=0.3)
    assert (tmp_path / "out/train.jsonl").read_bytes() == before


def test_one_group_or_no_column_is_refused(tasks: str, tmp_path: Path):
    one = write(tmp_path / "one.jsonl", [{"prompt": f"What is {n} + 2?"} for n in range(9)])
    with raises(DataError, "9 rows", "--by"):
        split_files([one], tmp_path / "out", share=0.1)
    with raises(DataError, "extra_info.size", where=tasks):
        split_files([tasks], tmp_path / "out", share=0.1, by="extra_info.size")
    with raises(ConfigError, "1.5", where="--val-share"):
        split_files([tasks], tmp_path / "out", share=1.5)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("Ann has 12 plums.", "Bob has 7 plums.", True),
        ('Spell "cat".', "Spell 'horse'.", True),
        ("Add 1.5 and -2", "Add 3 and 4,000", True),
        ("Ann has 12 plums.", "Ann has 12 pens.", False),
        ("Ann's 3 cats aren't here", "Bob's 4 cats aren't here", True),
        ("Łukasz has 1e5 plums", "Éva has 2 plums", True),
        ("What's the way to trees in John's house", "What's the way to boats in John's house", False),
        ("WHAT IS THE CAPITAL", "WHO WROTE THE BOOK", False),
    ],
)
def test_templates(a: str, b: str, same: bool):
    assert (template_of(a) == template_of(b)) is same


def test_rows_of_another_script_are_left_out(tmp_path: Path):
    texts = {"What is 2?": "two", "二是什么？": "two", "What is 3?": "三", "3 + 3 = ?": "6"}
    file = write(
        tmp_path / "rows.jsonl",
        [{"data_source": "s", "prompt": p, "reward_model": {"ground_truth": a}} for p, a in texts.items()],
    )
    out, rest = tmp_path / "out.jsonl", tmp_path / "rest.jsonl"
    counted = clean_files([file], out, rest, messages_key="messages", limit=99, language="en-US")
    assert counted.as_json() == {"kept": 2, "rejected": 2, "reasons": {"language": 2}}
    kept = [json.loads(line)["prompt"] for line in out.read_text().splitlines()]
    assert kept == ["What is 2?", "3 + 3 = ?"]
    with raises(ConfigError, "'eng'", where="--language"):
        clean_files([file], out, rest, messages_key="messages", limit=99, language="eng")


def test_rows_to_read_are_not_written_over(tmp_path: Path):
    row = {"data_source": "s", "prompt": "What is 2?", "reward_model": {"ground_truth": "2"}}
    one, other, out = (
        write(tmp_path / "rows.jsonl", [row]),
        write(tmp_path / "other.jsonl", [row]),
        tmp_path / "out.jsonl",
    )
    for kept, rest, option in (
        (one, out, "--out"),
        (out, other, "--rejected"),
        (out, tmp_path / "x/../out.jsonl", "--rejected"),
    ):
        with raises(ConfigError, where=option):
            clean_files([one], Path(kept), Path(rest), messages_key="messages", limit=99, against=[other])
    assert json.loads(Path(one).read_text()) == row and not out.exists()


def said(text: str) -> list[dict]:
    return [{"role": "assistant", "content": text}]


def shapes(pairs: list[tuple[str, str]], prompt: str = "?") -> list[str]:
    rows = [
        Row(str(n), f"row {n}", {"prompt": prompt, "chosen": said(a), "rejected": b}) for n, (a, b) in enumerate(pairs)
    ]
    return [finding.error.what for finding in checks.pair_shapes(rows, "prompt")]


def test_pairs_of_different_form_are_named():
    alike = [("a b", "b a"), ("b", "c")] * 30
    assert shapes(alike) == []
    (longer,) = shapes([*alike[:10], *[("long answer", "x")] * 40])
    assert "40 of 50" in longer and "chosen answer is longer" in longer
    (shorter,) = shapes([("x", "long answer")] * 50)
    assert "rejected answer is longer" in shorter
    assert shapes([("```\n# a\n- b\n```", "```\nxxx\nyy.\n```")] * 50) == []  # code is not form
    (formatted,) = shapes([("- one\n**two**", "one two text.")] * 50)
    assert "more formatted" in formatted and "2 chosen, 0 rejected" in formatted
    assert shapes([("long answer", "x")] * 49) == []
    asked = "Say what the weather is."
    (copied,) = shapes([(f"{asked} ab", f"{asked} ba")] * 50, asked)
    assert "50 of 50" in copied
    question = [{"role": "user", "content": asked}]
    whole = [Row(str(n), "", {side: question + said(f"{asked} {side}") for side in ("yes", "no")}) for n in range(50)]
    found = [finding.error.what for finding in checks.pair_shapes(whole, "prompt", ("yes", "no"))]
    assert any("50 of 50 yes answers repeat" in one for one in found)


def test_the_command_splits(tasks: str, tmp_path: Path):
    ended = CliRunner().invoke(app, ["data", "split", tasks, "--out", str(tmp_path / "out"), "--val-share", "0.2"])
    assert ended.exit_code == 0, ended.output
    assert list(map(len, parts_of(tmp_path / "out"))) == [16, 4]
