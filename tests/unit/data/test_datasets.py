"""Reading files, and datasets of prompts and conversations."""

import json
import logging
import re
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from support.messages import raises

from hone.data.conversations import ConversationDataset
from hone.data.files import count_rows, read_rows
from hone.data.messages import check_messages, plain
from hone.data.prompts import PromptDataset
from hone.data.tokenizing import overlong_rows
from hone.errors import ConfigError, DataError


def row(prompt, **more):
    return {"data_source": "arithmetic", "prompt": prompt, "reward_model": {"ground_truth": "4"}, **more}


def asked(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def prompts(tokenizer):
    def make(files, limit=64, policy="error", **more):
        keys = {"prompt_key": "prompt", "reward_fn_key": "data_source"}
        return PromptDataset(files, tokenizer, **keys, max_prompt_length=limit, truncation=policy, **more)

    return make


# files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.parquet", "a.json", "a.jsonl"])
def test_all_formats_read_the_same(write_rows, name):
    rows = [{"x": 1, "y": [{"k": "v"}], "z": "no"}, {"x": 2, "y": [], "z": "no"}]
    rows_read = read_rows(write_rows(rows, name), required=("x",), optional=("y", "absent"))
    assert [r.values for r in rows_read] == [{"x": 1, "y": [{"k": "v"}]}, {"x": 2, "y": []}]
    assert [r.uid for r in rows_read] == ["a:0", "a:1"]
    assert rows_read[1].where.endswith(f"{name}, row 1")


def test_files_are_read_in_order_and_uids_are_unique(write_rows, tmp_path):
    first = write_rows([{"x": 1}, {"x": 2}])
    (tmp_path / "other").mkdir()
    second = tmp_path / "other" / "train.jsonl"
    second.write_text('{"x": 3}\n\n{"x": 4}\n')
    rows_read = read_rows([first, second], required=("x",))
    assert [(r.uid, r.values["x"]) for r in rows_read] == [
        ("train.0:0", 1),
        ("train.0:1", 2),
        ("train.1:0", 3),
        ("train.1:1", 4),
    ]
    assert [r.values["x"] for r in read_rows([first, second], required=("x",), max_rows=3)] == [1, 2, 3]
    assert read_rows(first, required=("x",), max_rows=0) == []


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_mark_of_the_byte_order_is_not_text(tmp_path, name):
    (tmp_path / name).write_bytes(
        b'\xef\xbb\xbf{"prompt": "x"}' if name.endswith("l") else b'\xef\xbb\xbf[{"prompt": "x"}]'
    )
    assert [row.values for row in read_rows(tmp_path / name, required=("prompt",))] == [{"prompt": "x"}]


def test_only_line_feeds_end_a_row(tmp_path):
    """A model writes every character, line separators of Unicode among them; JSON need not escape them."""
    path, texts = tmp_path / "rows.jsonl", ["a\u2028b", "c\u0085d", "e\x1cf", ""]
    path.write_text("\n".join(json.dumps({"x": text}, ensure_ascii=False) for text in texts) + "\n", encoding="utf-8")
    assert [row.values["x"] for row in read_rows(path, required=("x",))] == texts


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_beyond_the_limit_are_not_parsed(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"x": 1}\n\n{"x": 2}\nno JSON\n')
    assert [row.values for row in read_rows(path, required=("x",), max_rows=2)] == [{"x": 1}, {"x": 2}]
    with raises(DataError, "line 4"):
        read_rows(path, required=("x",))


@pytest.mark.parametrize("form", ["parquet", "jsonl", "json", "csv", "arrow"])
def test_rows_are_counted_as_they_are_read(write_rows, tmp_path, form):
    path, rows = tmp_path / f"a.{form}", [{"x": str(number)} for number in range(7)]
    if form == "csv":
        path.write_text("x\n" + "\n".join(row["x"] for row in rows))
    elif form == "json":
        path.write_text(json.dumps(rows))
    elif form == "arrow":
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    else:
        path = write_rows(rows, path.name)
    for most in (-1, 0, 3, 7, 9, 14, 20):
        assert count_rows([path, path], most) == len(read_rows([path, path], required=(), max_rows=most)), most


def test_json_lines_under_the_name_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    assert [r.values["x"] for r in read_rows(path, required=("x",))] == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "mentions"),
    [
        ("a.parquet", b"not parquet", ("parquet", "write the file again")),
        ("a.json", b"{", ("json", "write the file again")),
        ("a.json", b"[]", ("hone data make",)),
        ("a.json", b"[1]", ("row 0", "int")),
        ("a.jsonl", b'{"prompt": 1}\n{oops}\n', ("line 2",)),
        ("a.jsonl", b"", ("hone data make",)),
        ("a.jsonl", b"\xff\xfe", ("UTF-8", "iconv", "NEW.jsonl")),
        ("a.json", b'[{"prompt": "Gr\xfc\xdfe"}]', ("UTF-8", "iconv")),
        ("a.csv", b"prompt\nGr\xfc\xdfe\n", ("UTF-8", "iconv", "NEW.csv")),
        ("a.jsonl", b'{"promt": 1}', ("'prompt'", "row 0", "Did you mean promt")),
        ("a.csv", b"x", ("'prompt'", "x", "data.prompt_key=COLUMN")),
        ("a.csv", b"prompt,x\n1,2,3\n", ("row 0", "line 2", "'3'")),
        ("a.txt", b"x", ("'.txt'", ".jsonl")),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, mentions):
    (tmp_path / name).write_bytes(content)
    with raises(DataError, *mentions):
        read_rows(tmp_path / name, required=("prompt",))


def test_missing_files_and_columns_name_the_nearest(write_rows, tmp_path):
    path = write_rows([{"prompts": 1, "x": 2}], "train.parquet")
    with raises(DataError, "'prompt'", "prompts, x", "Did you mean prompts", "data.prompt_key=COLUMN", where=str(path)):
        read_rows(path, required=("prompt",))
    with raises(DataError, "trian.parquet", "Did you mean train.parquet"):
        read_rows(tmp_path / "trian.parquet", required=())
    with raises(DataError, "a.json", str(tmp_path / "nowhere")):
        read_rows(tmp_path / "nowhere" / "a.json", required=())
    with raises(DataError, f"{tmp_path}/train.parquet"):
        read_rows(tmp_path, required=())
    with raises(DataError, "data.train_files=PATH"):
        read_rows([], required=())


def test_an_empty_parquet_file_is_refused(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with raises(DataError, "hone data make", where=str(tmp_path / "a.parquet")):
        read_rows(tmp_path / "a.parquet", required=("prompt",))


# messages ------------------------------------------------------------------------------------------------------------


def test_numpy_becomes_plain():
    value = {"a": np.array([{"role": "user", "content": np.str_("x")}], dtype=object), "b": np.int64(3), "c": (1, 2)}
    converted = plain(value)
    assert converted == {"a": [{"role": "user", "content": "x"}], "b": 3, "c": [1, 2]}
    assert type(converted["b"]) is int and type(converted["a"]) is list


def test_nulls_that_arrow_adds_are_removed_and_those_of_the_user_stay(write_rows):
    def row(name, arguments):
        call = {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}
        schema = {
            "name": name,
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in arguments}},
        }
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": messages, "tools": [{"type": "function", "function": schema}]}

    rows = [row("add", {"a": "1"}), row("move", {"b": "2", "to": None})]
    expected = [row["messages"][1]["tool_calls"] for row in rows], [row["tools"] for row in rows]
    for name in ("train.jsonl", "train.parquet"):
        read = read_rows(write_rows(rows, name), required=("messages", "tools"))
        calls = [check_messages(r.values["messages"], where="", column="messages")[1]["tool_calls"] for r in read]
        tools = [r.values["tools"] for r in read]
        if name.endswith("parquet"):  # where a null that was written cannot be told from one that was added
            del expected[0][1][0]["function"]["arguments"]["to"]
        assert (calls, tools) == expected


@pytest.mark.parametrize(
    ("value", "mentions"),
    [
        ([], ("an empty list",)),
        ({"role": "user"}, ("dict",)),
        (["x"], ("prompt[0]", "str")),
        ([{"content": "x"}], ("prompt[0]", "'role'")),
        ([{"role": "user", "content": "x"}, {"role": "user"}], ("prompt[1]", "user", "'content'")),
        ([{"role": "user", "content": 3}], ("prompt[0]", "'content'")),
        ([{"role": "model", "content": "x"}], ("prompt[0]", "'model'", "assistant")),
        ([{"role": "User", "content": "x"}], ("prompt[0]", "'User'", "user")),
        ([{"role": "user", "content": [{"type": "text"}]}], ("content[0]", "'text'")),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}], ("content[0]", "'thinking'")),
        ([{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}], ("content[0]", "tool_calls")),
        ([{"role": "assistant", "tool_calls": '[{"name": "f"}]'}], ("prompt[0].tool_calls",)),
        ([{"role": "assistant", "tool_calls": ["f"]}], ("prompt[0].tool_calls",)),
        ([{"role": "assistant", "content": "x", "function_call": {"name": "f"}}], ("function_call", "tool_calls")),
        ([{"role": "assistant", "content": "x", "reasoning": ["a"]}], ("prompt[0].reasoning", "list")),
        (3.5, ("float",)),
        (None, ("NoneType",)),
    ],
)
def test_bad_messages_are_refused_with_their_row(write_rows, prompts, value, mentions):
    with raises(DataError, "train.jsonl, row 1", *mentions, code="R42"):
        prompts(write_rows([row("fine"), row(value)]))


# prompts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["train.parquet", "train.jsonl"])
def test_messages_are_rendered_with_the_generation_prompt(write_rows, prompts, tokenizer, name):
    dataset = prompts(
        write_rows([row(asked("hello"), extra_info={"index": 4}), row(asked("7+12"), extra_info={"index": 5})], name)
    )
    assert len(dataset) == 2 and dataset.data_sources() == Counter(arithmetic=2)
    sample = dataset[1]
    text = "<|im_start|>user\n7+12<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(sample.prompt_ids) == text and sample.messages == asked("7+12")
    assert (sample.uid, sample.ground_truth, sample.extra_info["index"]) == ("train:1", "4", 5)


def test_strings_and_token_ids_are_left_alone(write_rows, prompts, tokenizer):
    tokenizer.chat_template = None  # not needed for either
    dataset = prompts(write_rows([row("Q: 1+1 A:"), row([5, 6, 7]), {"data_source": "b", "prompt": "x"}]))
    assert dataset[0].prompt_ids == tokenizer.encode("Q: 1+1 A:") and dataset[0].messages is None
    assert dataset[1].prompt_ids == [5, 6, 7] and dataset[1].messages is None
    assert dataset[2].ground_truth is None and dataset[2].extra_info == {}
    with raises(DataError, "model.custom_chat_template=PATH"):
        prompts(write_rows([row(asked("hello"))]))


@pytest.mark.parametrize(
    ("bad", "mentions"),
    [
        ({"data_source": 3}, ("'data_source'", 3)),
        ({"reward_model": "4"}, ("'reward_model'", "str")),
        ({"extra_info": [1]}, ("'extra_info'", "list")),
        ({"prompt": ""}, ("prompt",)),
    ],
)
def test_bad_rows_are_refused(write_rows, prompts, bad, mentions):
    with raises(DataError, "row 0", *mentions):
        prompts(write_rows([{**row("x"), **bad}]))


def test_long_prompts(write_rows, prompts, caplog):
    path = write_rows([row([1] * length) for length in (3, 9, 5, 12)])
    with raises(DataError, "2 of 4", "longest 12", "data.max_prompt_length=5", "data.max_prompt_length=12"):
        prompts(path, 5)
    with caplog.at_level(logging.WARNING):
        dropped = prompts(path, 5, "drop")
    assert "2 of 4 prompts" in caplog.text
    assert [dropped[i].uid for i in range(2)] == ["train:0", "train:2"]
    assert (len(dropped), dropped.dropped, dropped.truncated) == (2, 2, 0)
    path = write_rows([row(list(range(length))) for length in (3, 9)])
    cut = prompts(path, 5, "truncate")
    assert cut[1].prompt_ids == [4, 5, 6, 7, 8] and cut[0].prompt_ids == [0, 1, 2]
    assert (cut.dropped, cut.truncated) == (0, 1)
    with raises(DataError, "2 of 2", "data.max_prompt_length=9"):
        prompts(path, 2, "drop")
    sides = {side: prompts(path, 5, side)[1].prompt_ids for side in ("left", "right", "middle")}
    assert sides == {"left": [4, 5, 6, 7, 8], "right": [0, 1, 2, 3, 4], "middle": [0, 1, 6, 7, 8]}
    with raises(ConfigError, "'top'", where="data.truncation"):
        prompts(path, 2, "top")


def test_the_first_rows_only(write_rows, prompts):
    path = write_rows([row("a"), row("b"), row(3.5)])  # the third row is never looked at
    assert len(prompts(path, max_samples=2)) == 2
    with raises(DataError, "max_samples=0", "data.max_samples=-1"):
        prompts(path, max_samples=0)


# conversations -------------------------------------------------------------------------------------------------------


def chat(*texts):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


@pytest.fixture
def conversations(tokenizer):
    def make(files, limit=64, policy="error", **more):
        return ConversationDataset(
            files, tokenizer, messages_key="messages", max_length=limit, truncation=policy, **more
        )

    return make


def test_conversations_are_rendered_with_their_mask(write_rows, conversations, tokenizer):
    dataset = conversations(write_rows([chat("hello", "7+12=19"), chat("a", "b", "c", "d")]))
    one = dataset[0]
    assert len(dataset) == 2 and len(one.input_ids) == len(one.loss_mask)
    kept = [token for token, bit in zip(one.input_ids, one.loss_mask, strict=True) if bit]
    assert tokenizer.decode(kept) == "7+12=19<|im_end|>"
    assert sum(dataset[1].loss_mask) == 4


def test_long_conversations(write_rows, conversations):
    path = write_rows([chat("a", "b"), chat("a", "1" * 40), chat("1" * 40, "b")])
    short = len(conversations(path)[0].input_ids)
    with raises(DataError, "2 of 3", "data.max_length=20"):
        conversations(path, 20)
    dropped = conversations(path, 20, "drop")
    assert (len(dropped), dropped.dropped, dropped.truncated) == (1, 2, 0)
    cut = conversations(path, 20, "truncate")  # of the third nothing that the assistant wrote would be left
    assert (len(cut), cut.dropped, cut.truncated) == (2, 1, 1)
    assert [len(cut[i].input_ids) for i in range(2)] == [short, 20] and cut[1].loss_mask[-1] == 1
    with raises(DataError, 3, "data.max_length=3"):
        conversations(path, 3, "truncate")
    left, middle = conversations(path, 20, "left"), conversations(path, 20, "middle")
    assert (len(left), left.dropped, left.truncated) == (3, 0, 2) and left[2].input_ids == conversations(path, 99)[
        2
    ].input_ids[-20:]
    whole = conversations(path, 99)[2]
    assert middle[2].input_ids == whole.input_ids[:10] + whole.input_ids[-10:]
    assert middle[2].loss_mask == whole.loss_mask[:10] + whole.loss_mask[-10:]


@pytest.mark.parametrize("left_out", [{"weight": 0}, {"train": False}])
def test_turns_that_are_left_out_are_not_learned(write_rows, conversations, tokenizer, left_out):
    messages = chat("a", "b", "c", "d")["messages"]
    messages[1] |= left_out
    one = conversations(write_rows([{"messages": messages}]))[0]
    kept = [token for token, bit in zip(one.input_ids, one.loss_mask, strict=True) if bit]
    assert tokenizer.decode(kept) == "d<|im_end|>"


@pytest.mark.parametrize("wrong", [{"weight": 0.5}, {"weight": "0"}, {"train": 0}, {"train": "false"}])
def test_a_weight_that_is_neither_is_refused(write_rows, conversations, wrong):
    messages = chat("a", "b", "c", "d")["messages"]
    messages[1] |= wrong
    with raises(DataError, "train.jsonl, row 0", 1, *wrong, code="R42"):
        conversations(write_rows([{"messages": messages}]))


def test_a_conversation_without_an_answer_names_its_row(write_rows, conversations):
    with raises(DataError, "train.jsonl, row 1", "'assistant'"):
        conversations(write_rows([chat("a", "b"), chat("a")]))
    with raises(DataError, "'messages'"):
        conversations(write_rows([{"text": json.dumps("x")}]))


@pytest.mark.parametrize("count", [1, 10, 100, 1000])
def test_lengths_of_what_is_too_long_are_given(count: int) -> None:
    lengths = list(range(1, count + 1))
    with pytest.raises(DataError) as caught:
        overlong_rows(lengths, 0, "error", what="prompts", key="k")
    numbers = list(map(int, re.findall(r"\d+", str(caught.value).split(" fix")[0])))
    nearest = lengths[min(count, int(0.99 * count) + 1) - 1]
    assert numbers[:2] == [count, count] and {count, nearest} <= set(numbers[2:])
