"""Reading files, and datasets of prompts and conversations."""

import json
import logging
from collections import Counter

import numpy as np
import pytest

from hone.data.conversations import ConversationDataset
from hone.data.files import read_rows
from hone.data.messages import check_messages, plain
from hone.data.prompts import PromptDataset
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
    found = read_rows(write_rows(rows, name), required=("x",), optional=("y", "absent"))
    assert [r.values for r in found] == [{"x": 1, "y": [{"k": "v"}]}, {"x": 2, "y": []}]
    assert [r.uid for r in found] == ["a:0", "a:1"]
    assert found[1].where.endswith(f"{name}, row 1")


def test_files_are_joined_in_order_and_uids_stay_apart(write_rows, tmp_path):
    first = write_rows([{"x": 1}, {"x": 2}])
    (tmp_path / "other").mkdir()
    second = tmp_path / "other" / "train.jsonl"
    second.write_text('{"x": 3}\n\n{"x": 4}\n')
    found = read_rows([first, second], required=("x",))
    assert [(r.uid, r.values["x"]) for r in found] == [
        ("train.0:0", 1),
        ("train.0:1", 2),
        ("train.1:0", 3),
        ("train.1:1", 4),
    ]
    assert [r.values["x"] for r in read_rows([first, second], required=("x",), max_rows=3)] == [1, 2, 3]
    assert read_rows(first, required=("x",), max_rows=0) == []


def test_json_lines_under_the_name_json(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    assert [r.values["x"] for r in read_rows(path, required=("x",))] == [1, 2]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"not parquet", "cannot be read as parquet"),
        ("a.json", b"{", "cannot be read as json"),
        ("a.json", b"[]", "has no rows"),
        ("a.json", b"[1]", "row 0 is a int"),
        ("a.jsonl", b'{"prompt": 1}\n{oops}\n', "line 2"),
        ("a.jsonl", b"", "has no rows"),
        ("a.jsonl", b"\xff\xfe", "cannot be read as jsonl"),
        ("a.jsonl", b'{"promt": 1}', "no column 'prompt' in row 0; the columns are promt(.|\n)*Did you mean promt"),
        ("a.csv", b"x", "ends in '.csv'"),
    ],
)
def test_bad_files_are_told(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_rows(tmp_path / name, required=("prompt",))


def test_missing_files_and_columns_name_the_nearest(write_rows, tmp_path):
    path = write_rows([{"prompts": 1, "x": 2}], "train.parquet")
    with pytest.raises(DataError, match="no column 'prompt'; the columns are prompts, x(.|\n)*Did you mean prompts"):
        read_rows(path, required=("prompt",))
    with pytest.raises(DataError, match="does not exist(.|\n)*Did you mean train.parquet"):
        read_rows(tmp_path / "trian.parquet", required=())
    with pytest.raises(DataError, match="folder .* does not exist"):
        read_rows(tmp_path / "nowhere" / "a.json", required=())
    with pytest.raises(DataError, match="is a directory"):
        read_rows(tmp_path, required=())
    with pytest.raises(DataError, match="no dataset file is given"):
        read_rows([], required=())


def test_an_empty_parquet_file_is_told(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no rows"):
        read_rows(tmp_path / "a.parquet", required=("prompt",))


# messages ------------------------------------------------------------------------------------------------------------


def test_numpy_becomes_plain():
    value = {"a": np.array([{"role": "user", "content": np.str_("x")}], dtype=object), "b": np.int64(3), "c": (1, 2)}
    found = plain(value)
    assert found == {"a": [{"role": "user", "content": "x"}], "b": 3, "c": [1, 2]}
    assert type(found["b"]) is int and type(found["a"]) is list


def test_nulls_that_parquet_adds_are_removed():
    call = {"name": "add", "arguments": {"a": 1, "b": None}}
    messages = [{"role": "user", "content": "x", "tool_calls": None}, {"role": "assistant", "content": None, "tool_calls": [call]}]  # fmt: skip
    assert check_messages(messages, where="here", column="prompt") == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]},
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "an empty list"),
        ({"role": "user"}, "is a dict, not a list of messages"),
        (["x"], r"prompt\[0\] is a str"),
        ([{"content": "x"}], r"prompt\[0\] has no 'role'"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], r"prompt\[1\] \(role user\) has no 'content'"),
        ([{"role": "user", "content": 3}], "has no 'content'"),
        (3.5, "is a float"),
        (None, "is a NoneType"),
    ],
)
def test_bad_messages_are_told_with_their_row(write_rows, prompts, value, message):
    with pytest.raises(DataError, match=r"R42 .*train\.jsonl, row 1: .*" + message):
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
    with pytest.raises(DataError, match="no chat template"):
        prompts(write_rows([row(asked("hello"))]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"data_source": 3}, "column 'data_source' is 3"),
        ({"reward_model": "4"}, "column 'reward_model' is a str"),
        ({"extra_info": [1]}, "column 'extra_info' is a list"),
        ({"prompt": ""}, "has no tokens"),
    ],
)
def test_bad_rows_are_told(write_rows, prompts, bad, message):
    with pytest.raises(DataError, match="row 0: .*" + message):
        prompts(write_rows([{**row("x"), **bad}]))


def test_long_prompts(write_rows, prompts, caplog):
    path = write_rows([row([1] * length) for length in (3, 9, 5, 12)])
    with pytest.raises(
        DataError, match=r"2 of 4 prompts .*=5 tokens \(longest 12, .*\n.*\n.*data.max_prompt_length=12"
    ):
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
    with pytest.raises(DataError, match="no row would be left"):
        prompts(path, 2, "drop")
    with pytest.raises(ConfigError, match="unknown policy 'left'"):
        prompts(path, 2, "left")


def test_the_first_rows_only(write_rows, prompts):
    path = write_rows([row("a"), row("b"), row(3.5)])  # the third row is never looked at
    assert len(prompts(path, max_samples=2)) == 2
    with pytest.raises(DataError, match="max_samples=0"):
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
    with pytest.raises(DataError, match="2 of 3 conversations are longer than data.max_length=20"):
        conversations(path, 20)
    dropped = conversations(path, 20, "drop")
    assert (len(dropped), dropped.dropped, dropped.truncated) == (1, 2, 0)
    cut = conversations(path, 20, "truncate")  # of the third nothing that the assistant wrote would be left
    assert (len(cut), cut.dropped, cut.truncated) == (2, 1, 1)
    assert [len(cut[i].input_ids) for i in range(2)] == [short, 20] and cut[1].loss_mask[-1] == 1
    with pytest.raises(DataError, match="all 3 conversations begin with more than"):
        conversations(path, 3, "truncate")


def test_a_conversation_without_an_answer_names_its_row(write_rows, conversations):
    with pytest.raises(DataError, match=r"train\.jsonl, row 1: no message with role 'assistant'"):
        conversations(write_rows([chat("a", "b"), chat("a")]))
    with pytest.raises(DataError, match="no column 'messages'"):
        conversations(write_rows([{"text": json.dumps("x")}]))
