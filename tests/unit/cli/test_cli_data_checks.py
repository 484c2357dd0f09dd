"""`hone data check`, `stats`, `inspect` and `convert`, as typed."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.image_models import data_url, drawn
from support.messages import raises
from support.preflight import rows, write_rows
from typer.testing import CliRunner

from hone.apps.lab.data.inspection import histogram
from hone.cli.data import app
from hone.data.checks import check_calls, overlong_prompts, prompt_lengths, tool_schemas
from hone.data.conversations import ConversationDataset
from hone.data.convert import GROUND_TRUTHS
from hone.data.files import Row, read_all
from hone.data.messages import check_messages
from hone.data.row_images import RowImages
from hone.data.statistics import form_of, mean_and_quantiles
from hone.errors import ConfigError, DataError


def run(*words):
    return CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from hone.apps.lab.data.inspection import train_tokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "text.jsonl").write_text(json.dumps({"prompt": "What is 1 + 1?"}) + "\n")
    train_tokenizer([folder / "text.jsonl"], folder / "t", vocab_size=300, template="chatml")
    return folder / "t"


@pytest.fixture
def data(tmp_path):
    return write_rows(tmp_path / "train.jsonl", rows(80))


# ------------------------------------------------------------------------------------------------------------ check


def test_sound_rows(data, tokenizer, tmp_path):
    val = write_rows(tmp_path / "val.jsonl", rows(90)[80:])
    shown = run("check", data, "--val", val, "--tokenizer", tokenizer, "--html", tmp_path / "r.html")
    assert shown.exit_code == 0 and "for rl and sft" in shown.output
    assert " R" not in shown.output
    page = (tmp_path / "r.html").read_text()
    assert (
        page.count("<svg") == 3 and "prompt tokens" in page and "conversation tokens" in page and "http" not in page
    ), "nothing is loaded from elsewhere"


def test_conversations_that_the_template_does_not_show_are_found(tokenizer, tmp_path):
    thought = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    sound = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file = write_rows(tmp_path / "d.jsonl", [{"messages": sound}, {"messages": [sound[0], thought]}])
    result = run("check", file, "--tokenizer", tokenizer, "--json")
    (finding,) = [finding for finding in json.loads(result.stdout)["findings"] if finding["code"] == "R39"]
    assert result.exit_code == 2 and finding["where"].endswith("row 1") and "'hm'" in finding["what"]


@pytest.mark.parametrize(
    "chosen", [[{"role": "assistant", "content": "b", "reasoning_content": "hm"}], {"from": "gpt", "value": "a"}]
)
def test_pairs_that_training_would_refuse_are_found(tokenizer, tmp_path, chosen):
    ask, other = [{"role": "user", "content": "a"}], [{"role": "assistant", "content": "c"}]
    file = write_rows(tmp_path / "d.jsonl", [{"prompt": ask, "chosen": chosen, "rejected": other}])
    result = run("check", file, "--tokenizer", tokenizer, "--json")
    found = [finding["code"] for finding in json.loads(result.stdout)["findings"]]
    assert result.exit_code == 2 and "R39" in found


def test_pairs_may_have_columns_of_other_names(tmp_path):
    pair = {"prompt": "a", "better": "b", "worse": "c"}
    file = write_rows(tmp_path / "d.jsonl", [pair, pair | {"worse": "b"}])
    result = run("check", file, "data.chosen_key=better", "--rejected-key", "worse", "--json")
    report = json.loads(result.stdout)
    assert report["kinds"] == ["prefer"] and "better and worse are equal" in report["findings"][0]["what"]


@pytest.mark.parametrize("target", ["messages", "multimodal"])
def test_calls_are_converted_with_their_tools(tmp_path, target):
    def row(arguments):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": "a", "content": "r"}, {"role": "assistant", "content": "7"}]  # fmt: skip
        return {"messages": turns, "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]}

    given = [{"x": 1}, {"x": "b", "y": None}]
    file = write_rows(tmp_path / "d.jsonl", [row(arguments) for arguments in given])
    result = run("convert", file, "--to", target, "--out", tmp_path / "new.parquet")
    assert result.exit_code == 0, result.output
    rows = pq.read_table(tmp_path / "new.parquet").to_pylist()
    calls = [one["messages"][1]["tool_calls"][0]["function"] for one in rows]
    assert [json.loads(call["arguments"]) for call in calls] == given
    assert all(json.loads(one["tools"])[0]["function"]["name"] == "f" for one in rows)


def test_everything_wrong_at_once(tmp_path):
    content = rows(80)
    content[0]["reward_model"] = {"ground_truth": ""}
    content[1]["data_source"] = "gsm9k"
    content[2]["prompt"] = [{"role": "usr", "content": "<b>x</b>"}]
    content[3]["prompt"] = None
    content[4] |= {"agent_name": "tool_agent", "tools": "{", "extra_info": {"tools_kwargs": {"calc": {}}}}
    content[5]["messages"] = [{"role": "user", "content": "a"}]
    val = write_rows(tmp_path / "val.jsonl", content[10:12])
    result = run(
        "check", write_rows(tmp_path / "d.jsonl", content), "--val", val, "--html", tmp_path / "r.html", "--json"
    )
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    found = {(finding["code"], finding["severity"]) for finding in report["findings"]}
    assert {("R42", "error"), ("R43", "error"), ("R44", "error"), ("R48", "error"), ("R35", "error")} <= found
    assert ("R47", "warning") in found and report["numbers"]["rows"] == 80
    severities = [finding["severity"] for finding in report["findings"]]
    assert severities == sorted(severities), "errors first"
    assert all(finding["fix"] and finding["what"] for finding in report["findings"])
    assert "usr" in (tmp_path / "r.html").read_text()


def test_columns_that_no_run_could_use(tmp_path):
    file = write_rows(tmp_path / "d.jsonl", [{"question": "a"}])
    with raises(DataError, "question", code="R42"):
        run("check", file)
    with raises(ConfigError, "top"):
        run("check", file, "--truncation", "top")
    with raises(DataError, "nowhere.parquet"):
        run("check", tmp_path / "nowhere.parquet")


def test_arrays_of_pandas_are_lists(tmp_path):
    """A nested column of numpy arrays of dicts, as data frames write it."""
    frame = {
        "prompt": [np.array([{"role": "user", "content": f"{n} + 1"}], dtype=object) for n in range(64)],
        "data_source": ["exact"] * 64,
        "reward_model": [{"ground_truth": np.array(["1", "one"])} for _ in range(64)],
    }
    table = {name: [v.tolist() if isinstance(v, np.ndarray) else v for v in values] for name, values in frame.items()}
    table["reward_model"] = [{"ground_truth": list(v["ground_truth"])} for v in frame["reward_model"]]
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    assert run("check", tmp_path / "d.parquet").exit_code == 0
    from hone.data import checks

    straight = [Row(str(n), f"row {n}", {name: frame[name][n] for name in frame}) for n in range(64)]
    assert list(checks.prompts(straight, "prompt")) == [] and list(checks.ground_truths(straight, True)) == []


def test_pairs(tmp_path):
    pairs = [{"prompt": f"q{n}", "chosen": "a", "rejected": "a" if n == 3 else "b"} for n in range(5)]
    result = run("check", write_rows(tmp_path / "d.jsonl", pairs), "--json")
    report = json.loads(result.stdout)
    assert report["kinds"] == ["prefer"] and result.exit_code == 2
    assert "1 of 5 rows: chosen and rejected are equal" in report["findings"][0]["what"]


def call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"id": str(len(arguments)), "function": {"name": name}}]}


def test_tools():
    tool = {"role": "tool", "content": "x" * 50}
    looping = Row("1", "row 1", {"messages": [call("f"), tool, call("f", a=1), tool, call("f", a=1, b=2), tool]})
    ending = Row("2", "row 2", {"messages": [call("f"), tool, call("g"), tool, call("f"), tool]})
    kinds = [
        {defect.kind for defect in check_calls([row], messages_key="messages", limit=limit).defects.get(0, ())}
        for row, limit in ((looping, 40), (looping, 50), (ending, 50))
    ]
    assert kinds == [{"loop", "long_result"}, {"loop"}, set()]
    schema = '[{"type": "function", "function": {"name": "f", "parameters": {}}}]'
    late = Row("3", "row 3", {"prompt": [{"role": "user", "content": "a"}, {"role": "user", "content": schema}]})
    (found,) = tool_schemas([late, Row("4", "row 4", {"tools": schema, "prompt": "a"})], "prompt")
    assert found.error.code == "R36" and "1 of 2 rows" in found.error.what and not found.stops


@given(lengths=st.lists(st.integers(0, 60), min_size=1, max_size=12), limit=st.integers(20, 60))
def test_lengths_are_those_of_the_tokenizer(tokenizer, lengths, limit):
    """No prompt over the limit is missed although most are never tokenized: bytes bound tokens."""
    from hone.data.chat import render_prompt
    from hone.data.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    chats = [[{"role": "user", "content": "ab cé 12 "[: n % 9] * (n // 3)}] for n in lengths]
    table = [Row(str(n), f"row {n}", {"prompt": chat}) for n, chat in enumerate(chats)]
    true = sorted((len(render_prompt(loaded, chat)) for chat in chats), reverse=True)
    measured = prompt_lengths(table, "prompt", loaded, limit)
    assert measured.overlong == [length for length in true if length > limit]
    assert bool(list(overlong_prompts(measured, "error"))) == (true[0] > limit)


# ------------------------------------------------------------------------------------------------- stats and inspect


def test_stats(data):
    numbers = json.loads(run("stats", data, "--json").output)
    assert (
        numbers["rows"] == 80 and numbers["prompt_forms"] == {"chat": 80} and numbers["data_sources"] == {"exact": 80}
    )
    assert numbers["roles"] == {"user": 80, "assistant": 80} and numbers["turns"]["p50"] == 2
    assert numbers["ground_truths"] == {"str": 80} and "prompt characters" in run("stats", data).output


@given(st.lists(st.integers(0, 100), min_size=1))
def test_spread(numbers):
    found = mean_and_quantiles(numbers)
    assert found["p0"] == min(numbers) and found["p100"] == max(numbers)
    assert found["p0"] <= found["p25"] <= found["p50"] <= found["p99"] <= found["p100"]
    assert abs(found["mean"] - sum(numbers) / len(numbers)) <= 0.01
    drawn = histogram(numbers)
    assert sum(int(part.split("<")[0]) for part in drawn.replace("</title>", "<").split(": ")[1:]) == len(numbers)


def test_forms():
    image = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]}]
    assert [form_of(p) for p in ("a", [1, 2], [{"role": "user"}], image, [], None, 7)] == [
        *("string", "token ids", "chat", "multimodal", "empty", "empty", "int")
    ]


def test_inspect(data, tokenizer):
    shown = json.loads(run("inspect", data, "--tokenizer", tokenizer, "--row", 3, "--conversation", "--json").output)
    text = "".join(piece["text"] for piece in shown["tokens"])
    assert (
        text == "<|im_start|>user\n3 + 1 = ?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        and "row 3" in shown["row"]
    )
    assert "".join(piece["text"] for piece in shown["tokens"] if piece["learned"]) == "4<|im_end|>"
    assert {piece["text"] for piece in shown["tokens"] if piece["special"]} == {"<|im_start|>", "<|im_end|>"}
    prompt = run("inspect", data, "--tokenizer", tokenizer, "--ids")
    assert "0 learned from" in prompt.output and "<|im_start|>assistant" in prompt.output and "special" in prompt.output
    with raises(DataError, "row 80 of 80 rows", "--row 79"):
        run("inspect", data, "--tokenizer", tokenizer, "--row", 80)


# ----------------------------------------------------------------------------------------------------------- convert

SHAREGPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2 + 2?"},
        {"from": "gpt", "value": "It is \\boxed{4}."},
        {"from": "human", "value": "And 3 + 3?"},
        {"from": "gpt", "value": "That makes \\boxed{6}."},
    ]
}
OPENAI = {
    "messages": [{"role": turn["from"].replace("human", "user").replace("gpt", "assistant"), "content": turn["value"]}
                 for turn in SHAREGPT["conversations"]]
}  # fmt: skip


@pytest.mark.parametrize("record", [SHAREGPT, OPENAI], ids=["sharegpt", "openai"])
@pytest.mark.parametrize(
    ("target", "form", "turns", "truth"),
    [("chat", "chat", 2, "4"), ("multi-turn", "multi-turn", 4, "6"), ("string", "string", None, "4")],
)
def test_conversations_are_converted(tmp_path, record, target, form, turns, truth):
    file = write_rows(tmp_path / "in.json", [record])
    made = run(
        "convert",
        file,
        "--to",
        target,
        "--ground-truth",
        "boxed",
        "--data-source",
        "math",
        "--out",
        tmp_path / "o.parquet",
    )
    assert made.exit_code == 0 and "1 rows" in made.output
    (row,) = read_all(tmp_path / "o.parquet")
    assert form_of(row.values["prompt"]) == form and row.values["reward_model"]["ground_truth"] == truth
    assert turns is None or len(row.values["prompt"]) == turns
    assert row.values["data_source"] == "math" and len(row.values["messages"]) == 5
    assert run("check", tmp_path / "o.parquet", "--batch-size", 1).exit_code == 0


def test_alpaca_and_csv(tmp_path):
    alpaca = write_rows(tmp_path / "a.jsonl", [{"instruction": "Add.", "input": "1 2", "output": "3"}])
    run("convert", alpaca, "--out", tmp_path / "a.out.jsonl", "--system", "Think.")
    (row,) = read_all(tmp_path / "a.out.jsonl")
    assert [m["content"] for m in row.values["prompt"]] == ["Think.", "Add.\n\n1 2"]
    (tmp_path / "c.csv").write_text('q;x,a\n"How, many?","so\n#### 1,200"\n,b\n', encoding="utf-8")
    made = run("convert", tmp_path / "c.csv", "--question", "q;x", "--answer", "a", "--ground-truth", "####", "--out", tmp_path / "c.parquet")  # fmt: skip
    assert "1 rows, 1 left out (without question or answer)" in made.output
    (row,) = read_all(tmp_path / "c.parquet")
    assert (
        row.values["reward_model"]["ground_truth"] == "1200" and row.values["extra_info"]["answer"] == "so\n#### 1,200"
    )


def test_prompts_and_completions_of_trl(tmp_path):
    user, said = [{"role": "user", "content": "Hi"}], [{"role": "assistant", "content": "HI"}]
    rows = [{"prompt": "Hi", "completion": "HI", "level": 1}, {"prompt": user, "completion": said, "level": 2}]
    file = write_rows(tmp_path / "t.jsonl", [*rows, {"prompt": "Hi", "completion": None, "level": 3}])
    with raises(DataError, "hone data convert", "--to messages"):
        ConversationDataset(file, None, messages_key="messages", max_length=9, truncation="error")
    made = run("convert", file, "--to", "messages", "--out", tmp_path / "m.jsonl")
    assert "2 rows, 1 left out" in made.output
    assert [row.values["messages"] for row in read_all(tmp_path / "m.jsonl")] == [user + said] * 2
    run("convert", file, "--out", tmp_path / "p.jsonl")
    (first, second) = (row.values for row in read_all(tmp_path / "p.jsonl"))
    assert first["prompt"] == second["prompt"] == user and first["level"] == 1 and "completion" not in first
    assert first["reward_model"]["ground_truth"] == "HI"


def test_multimodal(tmp_path):
    def record(images):
        turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat"}]
        return {"messages": turns, "images": images}

    (tmp_path / "cat.png").write_bytes(b"cat")
    file = write_rows(tmp_path / "m.jsonl", [record(["cat.png"]), record([]), record(["dog.png"])])
    made = run("convert", file, "--to", "multimodal", "--out", tmp_path / "m.parquet")
    assert "1 left out (with 1 marks <image> in the prompt and 0 images)" in made.output
    assert "1 left out (with an image that cannot be read)" in made.output
    (row,) = read_all(tmp_path / "m.parquet")
    parts = row.values["prompt"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "text"]
    assert row.values["images"] == [{"bytes": b"cat", "path": None}]
    assert form_of(row.values["prompt"]) == "multimodal" and len(row.values["messages"]) == 2


@pytest.mark.parametrize("target", ["multimodal", "chat", "multi-turn", "messages"])
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_converted_images_are_read_from_any_folder(tmp_path, target, ending):
    image = drawn((255, 0, 0))
    (tmp_path / "cat.png").write_bytes(image.content)
    turns = [{"role": "user", "content": "<image>What is it?"}, {"role": "assistant", "content": "A cat"}]
    part = [{"type": "image_url", "image_url": {"url": data_url(image)}}, {"type": "text", "text": "What is it?"}]
    rows = [{"messages": turns, "image": "cat.png"}, {"messages": [{"role": "user", "content": part}, turns[1]]}]
    file = write_rows(tmp_path / "m.jsonl", rows)
    run("convert", file, "--to", target, "--out", tmp_path / "other" / f"m{ending}")
    converted = read_all(tmp_path / "other" / f"m{ending}")
    reader = RowImages("images", None, any_model=True)
    assert len(converted) == 2
    for row, column in itertools.product(converted, {"messages", "prompt"} & converted[0].values.keys()):
        placed, images = reader.place(check_messages(row.values[column], where="", column=column), row)
        assert [part["type"] for part in placed[0]["content"]] == ["image", "text"] and images == (image,)


def test_what_cannot_be_converted(tmp_path):
    file = write_rows(tmp_path / "x.jsonl", [{"text": "hello"}])
    with raises(DataError, "text"):
        run("convert", file, "--out", tmp_path / "o.parquet")
    with raises(ConfigError, "'chats'", where="--to"):
        run("convert", file, "--to", "chats", "--out", tmp_path / "o.parquet")
    alone = write_rows(tmp_path / "y.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with raises(DataError, 1):
        run("convert", alone, "--out", tmp_path / "o.parquet")
    with raises(DataError, "'.txt'"):
        run("convert", write_rows(tmp_path / "z.jsonl", [SHAREGPT]), "--out", tmp_path / "o.txt")


def test_ground_truths_in_answers():
    answer = "First 3, then $1,234.50.\n#### 1,234"
    assert GROUND_TRUTHS["####"](answer) == "1234" and GROUND_TRUTHS["last-number"](answer) == "1234"
    assert GROUND_TRUTHS["boxed"](r"so \boxed{\frac{1}{2}}") == r"\frac{1}{2}" and GROUND_TRUTHS["boxed"]("none") == ""
