"""Data of one's own: plain columns, tables, empty cells, and plain strings as prompts."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.messages import raises
from typer.testing import CliRunner

from hone.apps.lab.data.inspection import inspect_row
from hone.cli.data import app
from hone.data.chat import strings_to_messages
from hone.data.convert import Conversion, convert
from hone.data.files import Row, read_all, read_rows
from hone.data.prompts import PromptDataset, samples_by_uid, scored_rows
from hone.errors import ConfigError, DataError

ROWS = [{"frage": "2+2?", "antwort": "4", "preis": "3,5"}, {"frage": 'a "b", c?', "antwort": None, "preis": None}]
TABLE = 'frage,antwort,preis\n2+2?,4,"3,5"\n"a ""b"", c?",, \n'


def written(folder, kind):
    file = folder / f"sätze.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ROWS), file)
    elif kind == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    else:
        separator = {"tsv": "\t"}.get(kind, ",")
        file.write_text(
            "\ufeff" + TABLE.replace(",antwort,", f"{separator}antwort{separator}") if kind == "csv" else ""
        )
        if kind == "tsv":
            file.write_text('frage\tantwort\tpreis\n2+2?\t4\t3,5\n"a ""b"", c?"\t\t\n')
    return file


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_every_form_gives_the_same_rows_and_answers(tmp_path, tokenizer, kind):
    folder = tmp_path / "my dir"
    folder.mkdir()
    file = written(folder, kind)
    assert [row.values for row in read_all(file)] == ROWS
    (first, second) = read_rows(file, required=("frage",), answer_key="antwort")
    assert first.values["reward_model"] == {"ground_truth": "4"}
    assert second.values["reward_model"] == {"ground_truth": None}
    dataset = PromptDataset(
        file,
        tokenizer,
        prompt_key="frage",
        reward_fn_key="data_source",
        max_prompt_length=64,
        truncation="error",
        all_columns=True,
        answer_key="antwort",
    )
    sample = dataset[0]
    assert (sample.ground_truth, sample.extra_info["preis"], sample.data_source) == ("4", "3,5", "default")
    tried = scored_rows(file, reward_fn_key="data_source", limit=2, prompt_key="frage", answer_key="antwort")
    assert [row.sample.ground_truth for row in tried] == ["4", None] and tried[0].sample.text == "2+2?"
    stored = samples_by_uid([file], reward_fn_key="data_source", prompt_key="frage")["sätze:0"]
    assert (stored.text, stored.extra_info) == ("2+2?", {"antwort": "4", "preis": "3,5"})


def test_an_answer_may_be_a_field_and_replaces_another_ground_truth(tmp_path):
    file = tmp_path / "a.jsonl"
    row = {"prompt": "x", "extra_info": {"answer": 7}, "reward_model": {"ground_truth": "old"}}
    file.write_text(json.dumps(row) + "\n")
    ((read),) = read_rows(file, required=("prompt",), answer_key="extra_info.answer")
    assert read.values["reward_model"] == {"ground_truth": 7}
    with raises(DataError, "'antwort'", "prompt, extra_info, reward_model"):
        read_rows(file, required=("prompt",), answer_key="antwort")


@pytest.mark.parametrize(
    ("text", "mentions"),
    [
        ("a,b\n1,2,3\n", ("row 0", "line 2", "'3'")),
        ('a,b\n"x\ny",2\n1,2,3\n', ("row 1", "line 4")),
        ('a,b\nx,1\n"y,2\nz,3\n', ("after row 0", "quote")),
        ("a,a\n1,2\n", ("a, a", "rename one")),
        ("a,b\n", ("hone data make",)),
        ("", ("hone data make",)),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(tmp_path, text, mentions):
    (tmp_path / "a.csv").write_text(text)
    with raises(DataError, *mentions):
        read_rows(tmp_path / "a.csv", required=())


def test_tables_with_semicolons_short_rows_and_long_cells(tmp_path):
    (tmp_path / "a.CSV").write_text(f"q;a;b\n1,5;2\n\n{'x' * 200_000};3;4\n")
    rows = [row.values for row in read_all(tmp_path / "a.CSV")]
    assert rows == [{"q": "1,5", "a": "2", "b": None}, {"q": "x" * 200_000, "a": "3", "b": "4"}]


# ---------------------------------------------------------------------------------------------- strings as messages


def asked(text):
    return [{"role": "user", "content": text}]


def test_plain_strings_are_messages_and_rendered_ones_stay(with_template, tokenizer):
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    rows = [
        Row(f"a:{n}", f"a, row {n}", {"q": text}) for n, text in enumerate(["hi", rendered, " ", asked("x"), [1, 2]])
    ]
    assert strings_to_messages(rows, "q", tokenizer) == (1, ["a, row 1"])
    assert [row.values["q"] for row in rows] == [asked("hi"), rendered, " ", asked("x"), [1, 2]]
    plain = with_template("{% for m in messages %}Human: {{ m.content }}\n\nAssistant:{% endfor %}")
    rows = [Row("a:0", "a, row 0", {"q": text}) for text in ("who?", "Human: who?\n\nAssistant:")]
    assert strings_to_messages(rows, "q", plain) == (1, ["a, row 0"])
    for refuses in (None, "{{ raise_exception('no') }}", "always the same"):
        tokenizer.chat_template = refuses
        assert strings_to_messages([Row("a:0", "a, row 0", {"q": "hi"})], "q", tokenizer) == (0, [])


@pytest.mark.parametrize("templated", [True, False])
def test_the_key_decides_and_rewards_get_the_text(tmp_path, tokenizer, templated):
    file = tmp_path / "a.csv"
    file.write_text("prompt\nhello\n")
    dataset = PromptDataset(
        file,
        tokenizer,
        prompt_key="prompt",
        reward_fn_key="data_source",
        max_prompt_length=64,
        truncation="error",
        strings_as_messages=templated,
    )
    sample, text = dataset[0], "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sample.prompt_ids) == (text if templated else "hello") and sample.text == "hello"
    assert (sample.messages, dataset.strings) == ((asked("hello"), (1, [])) if templated else (None, (0, [])))


def test_inspect_shows_what_a_run_sees(tmp_path, tokenizer):
    shown = inspect_row(Row("a:0", "a, row 0", {"prompt": "hello"}), tokenizer)
    assert "".join(piece.text for piece in shown).startswith("<|im_start|>user\nhello")


# --------------------------------------------------------------------------------------------------------- commands


def test_commands_take_the_keys_of_a_run(tmp_path, tokenizer_directory):
    folder = tmp_path / "my dir"
    folder.mkdir()
    file = written(folder, "csv")
    keys = (f"data.train_files='{file}'", 'data.prompt_key="frage"', "data.answer_key=antwort")
    report = run("check", *keys, "--json")
    found = {one["code"]: one for one in json.loads(report.output)["findings"]}
    assert report.exit_code == 2 and found["R44"]["severity"] == "error"
    assert "column 'antwort'" in found["R44"]["what"] and found["R44"]["where"].endswith("sätze.csv, row 1")
    assert "R42" not in found and found["R43"]["severity"] == "warning", "a run may name its reward"
    assert run("check", file, "--prompt-key", "frage", "--custom-reward").exit_code == 0
    out, rejected = tmp_path / "c.jsonl", tmp_path / "r.jsonl"
    assert run("clean", *keys, "--out", out, "--rejected", rejected).exit_code == 0
    assert [json.loads(line) for line in out.read_text().splitlines()] == ROWS[:1]
    assert [one["kind"] for one in json.loads(rejected.read_text())["reasons"]] == ["R44"]
    run("clean", *keys, "--out", out, "--rejected", rejected, "--allow", "R44")
    assert len(out.read_text().splitlines()) == 2
    assert "str 1, missing 1" in run("stats", *keys).output
    assert "2+2?" in run("inspect", *keys[:2], "--tokenizer", tokenizer_directory).output
    with raises(ConfigError, "data.anser_key", "answer_key"):
        run("check", file, "data.anser_key=x")


def test_clean_rejects_rows_without_a_prompt(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,n\nx,1\n,2\n")
    out, rejected = tmp_path / "c.jsonl", tmp_path / "r.jsonl"
    assert "R42: 1 rows" in run("clean", tmp_path / "a.csv", "--out", out, "--rejected", rejected).output
    assert "column 'prompt'" in rejected.read_text() and '"n": "1"' in out.read_text()


@pytest.mark.parametrize(
    ("prompts", "exact", "near"),
    [
        (["a b", "a b"], 1, 1),
        (["What is 3 + 4?", "what  is 3+4 ?", "What is 3 - 4?"], 0, 1),
        (["1 2", "12", "1  2."], 0, 1),
        (["ﬁve", "FIVE!"], 0, 1),
        (["-x", "x", "(x)"], 0, 0),
        (["您好。", "您好"], 0, 1),
    ],
)
def test_clean_leaves_out_repeated_prompts(tmp_path, prompts, exact, near):
    lines = [json.dumps({"prompt": asked(prompt), "reward_model": {"ground_truth": "1"}}) for prompt in prompts]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    out, rejected = tmp_path / "c.jsonl", tmp_path / "r.jsonl"
    for form, count in (((), 0), (("--drop-duplicates", "exact"), exact), (("--drop-duplicates", "near"), near)):
        shown = run("clean", tmp_path / "a.jsonl", "--out", out, "--rejected", rejected, "--json", *form)
        counts = json.loads(shown.output)
        assert (counts["kept"], counts["reasons"].get("duplicate", 0)) == (len(prompts) - count, count)
        assert json.loads(out.read_text().splitlines()[0]) == json.loads(lines[0]), "the first one stays"


def test_clean_leaves_out_what_validation_has_and_long_answers(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,city\nx,1\nX,2\ny,3\nz,12345\n")
    (tmp_path / "v.csv").write_text("prompt,city\nx,1\n")
    out, rejected = tmp_path / "c.jsonl", tmp_path / "r.jsonl"
    words = ("--answer-key", "city", "--against", tmp_path / "v.csv", "--max-answer-characters", 4)
    for form, kept in (((), ["X", "y"]), (("--drop-duplicates", "near"), ["y"])):
        run("clean", tmp_path / "a.csv", "--out", out, "--rejected", rejected, *words, *form)
        assert [json.loads(line)["prompt"] for line in out.read_text().splitlines()] == kept
    kinds = [one["kind"] for line in rejected.read_text().splitlines() for one in json.loads(line)["reasons"]]
    assert kinds == ["overlap", "overlap", "long_answer"]
    with raises(ConfigError, "'all'", "exact"):
        run("clean", tmp_path / "a.csv", "--out", out, "--rejected", rejected, "--drop-duplicates", "all")


def test_a_plain_answer_column_is_named_and_not_taken(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,solution\nx,1\ny,2\n")
    shown = run("check", tmp_path / "a.csv")
    assert shown.output.count("data.answer_key=solution") == 1 and shown.exit_code == 0


def test_convert_keeps_other_columns(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer,price,prompt\nq,a,3,old\n")
    convert([tmp_path / "a.csv"], tmp_path / "b.parquet", Conversion())
    ((row),) = read_all(tmp_path / "b.parquet")
    assert row.values["price"] == "3" and row.values["prompt"] == asked("q")
    assert row.values["reward_model"]["ground_truth"] == "a" and "question" not in row.values
