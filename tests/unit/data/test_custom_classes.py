"""Dataset and sampler classes of the user, and ShareGPT's conversations."""

import json

import pytest
from support.messages import raises

from hone.config.data import CustomDatasetConfig, DataConfig, SamplerConfig
from hone.data.conversations import ConversationDataset
from hone.data.convert import Conversion, convert
from hone.data.curriculum import make_sampler
from hone.data.custom import row_reader
from hone.data.files import read_all, read_rows
from hone.data.prompts import PromptDataset
from hone.errors import CheckpointError, ConfigError, DataError

TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def write_code(tmp_path):
    def write(code):
        path = tmp_path / f"code_{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code)
        return str(path)

    return write


# ShareGPT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_sharegpt_is_read_as_its_conversion_is(write_rows, tokenizer, tmp_path, name):
    rows = [{"conversations": TURNS, "system": "be brief"}, {"conversations": TURNS * 2, "system": ""}]
    path = write_rows(rows, name)
    convert([path], tmp_path / "new.parquet", Conversion(target="messages"))
    keys = {"messages_key": "messages", "max_length": 99, "truncation": "error"}
    direct, converted = (ConversationDataset(file, tokenizer, **keys) for file in (path, tmp_path / "new.parquet"))
    assert [vars(direct[i]) for i in range(2)] == [vars(converted[i]) for i in range(2)]
    assert read_rows(path, required=("messages",))[0].values == {
        "messages": [{"role": "system", "content": "be brief"}, *CHAT]
    }
    assert {"messages", "conversations"} <= read_all(path)[0].values.keys()
    assert read_all(path, as_stored=True)[0].values["conversations"] == TURNS


def test_sharegpt_turns_stand_for_messages_in_any_column(write_rows, tokenizer):
    path = write_rows([{"prompt": TURNS[:1], "data_source": "x"}])
    keys = {"prompt_key": "prompt", "reward_fn_key": "data_source", "max_prompt_length": 99, "truncation": "error"}
    assert PromptDataset(path, tokenizer, **keys)[0].messages == CHAT[:1]


def test_an_unknown_role_names_the_command(write_rows):
    path = write_rows([{"conversations": [*TURNS, {"from": "narrator", "value": "c"}]}])
    with raises(DataError, "[2]", "'narrator'", "hone data convert"):
        read_rows(path, required=("messages",))


@pytest.mark.parametrize(
    "turn",
    [
        {"from": "gpt", "value": None},
        {"from": "gpt", "value": 0},
        {"from": "human", "value": {"text": "x"}},
        {"from": "gpt"},
        {"from": "function_call", "value": "f(1)"},
        {"from": "function_call", "value": "[]"},
        {"from": "Function_Call", "value": '{"arguments": {}}'},
        {"from": "gpt", "value": [{"type": "document", "source": "x"}]},
    ],
)
def test_turns_without_a_text_or_a_call_are_refused(write_rows, turn):
    with raises(DataError, "row 0", "messages", code="R42"):
        read_rows(write_rows([{"conversations": [*TURNS, turn]}]), required=("messages",))


def test_calls_and_results_may_be_objects(write_rows):
    called = {"name": "f", "arguments": {"a": 1}}
    turns = [
        TURNS[0],
        {"from": "Function_Call", "value": called},
        {"from": "observation", "value": [{"b": "é"}, 5]},
        TURNS[1],
    ]
    (row,) = read_rows(write_rows([{"conversations": turns}]), required=("messages",))
    _, call, result, _ = row.values["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'} and call["content"] == ""
    assert (result["role"], result["content"]) == ("tool", '[{"b": "é"}, 5]')


# columns for rewards -------------------------------------------------------------------------------------------------


def test_every_column_reaches_a_reward_that_takes_columns(write_rows, tokenizer):
    path = write_rows(
        [
            {
                "prompt": "p",
                "data_source": "x",
                "difficulty": 3,
                "answer": "4",
                "extra_info": {"answer": "5"},
                "environment": 1,
            }
        ]
    )
    keys = {"prompt_key": "prompt", "reward_fn_key": "data_source", "max_prompt_length": 99, "truncation": "error"}
    assert PromptDataset(path, tokenizer, **keys)[0].extra_info == {"answer": "5"}
    assert PromptDataset(path, tokenizer, **keys, all_columns=True)[0].extra_info == {"difficulty": 3, "answer": "5"}


# dataset classes -----------------------------------------------------------------------------------------------------

ROWS = """
class Squares:
    def __init__(self, data_files, config, max_samples=-1):
        self.first = int(open(data_files[0]).read())
    def __len__(self):
        return 5
    def __getitem__(self, i):
        return {"prompt": f"{self.first + i} squared?", "reward_model": {"ground_truth": str((self.first + i) ** 2)}}
"""


def prompts_of(custom, files, tokenizer, **more):
    keys = {"prompt_key": "prompt", "reward_fn_key": "data_source", "max_prompt_length": 99, "truncation": "error"}
    data = DataConfig(row_fn=custom) if isinstance(custom, str) else DataConfig(custom_cls=custom)
    read = row_reader(data, tokenizer)
    return PromptDataset(files, tokenizer, **keys, read=read, **more)


def test_rows_of_a_dataset_class(write_code, tokenizer, tmp_path):
    (tmp_path / "first.txt").write_text("7")
    dataset = prompts_of(CustomDatasetConfig(write_code(ROWS)), [str(tmp_path / "first.txt")], tokenizer, max_samples=3)
    assert [dataset[i].ground_truth for i in range(len(dataset))] == ["49", "64", "81"]
    assert [dataset[i].uid for i in range(3)] == ["row:0", "row:1", "row:2"]


@pytest.mark.parametrize(
    ("code", "name", "error", "words"),
    [
        ("x = 1", "D", ConfigError, ("'D'",)),
        ("x = (", None, ConfigError, ("SyntaxError",)),
        ("class A: pass\nclass B: pass", None, ConfigError, ("2 classes", "A, B")),
        ("class D:\n def __init__(self, path): pass", None, ConfigError, ("path", "data_files")),
        ("class D:\n def __init__(self): 1 / 0", None, ConfigError, ("ZeroDivisionError",)),
        ("class D:\n def __len__(self): return 1\n def __getitem__(self, i): return 3", None, DataError, ("row 0",)),
        (
            "class D:\n def __len__(self): return 1\n def __getitem__(self, i): return {'a': 1}",
            None,
            DataError,
            ("'prompt'",),
        ),
        (
            "class D:\n def __len__(self): return 1\n def __getitem__(self, i): raise KeyError('z')",
            None,
            DataError,
            ("KeyError",),
        ),
    ],
)
def test_a_wrong_dataset_class_is_one_message(write_code, tokenizer, code, name, error, words):
    with raises(error, *words):
        prompts_of(CustomDatasetConfig(write_code(code), name), ["unused"], tokenizer)
    with raises(ConfigError, "does not exist"):
        prompts_of(CustomDatasetConfig("nowhere.py"), ["unused"], tokenizer)


RECORD = """
def row(record):
    steps, _, answer = record["answer"].partition("####")
    return {"prompt": record["question"], "reward_model": {"ground_truth": answer.strip().replace(",", "")}}

def keeps(record):
    return {"prompt": str(sorted(record)), "images": record["picture"]}

def broken(record):
    return record["question"]

number = 3
"""


def test_a_function_makes_each_row_of_a_record(write_code, write_rows, tokenizer):
    records = [{"question": f"{i} thousands?", "answer": f"So {i}.\n#### {i},000"} for i in range(4)]
    code, path = write_code(RECORD), write_rows(records)
    dataset = prompts_of(f"{code}:row", [path], tokenizer, max_samples=3)
    assert [dataset[i].ground_truth for i in range(len(dataset))] == ["0000", "1000", "2000"]
    plain = PromptDataset(
        [path], tokenizer, prompt_key="question", reward_fn_key="d", max_prompt_length=99, truncation="error"
    )
    assert [dataset[i].uid for i in range(3)] == [plain[i].uid for i in range(3)], "a row keeps its number"


def test_the_rows_of_a_function_are_read_in_the_folder_of_their_file(write_code, write_rows, tokenizer):
    path = write_rows([{"system": "s", "picture": "a.png", "conversations": [{"from": "human", "value": "x"}]}])
    read = row_reader(DataConfig(row_fn=f"{write_code(RECORD)}:keeps"), tokenizer)
    (row,) = read([path], required=("prompt",), optional=("images",))
    assert row.folder == path.parent and row.values["images"] == "a.png"
    assert row.values["prompt"] == "['conversations', 'picture', 'system']", "the record is as the file has it"


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("rows", ConfigError, ("'rows'", "row")),
        ("number", ConfigError, ("number",)),
        ("", ConfigError, ("FILE.py:NAME",)),
        ("broken", DataError, ("row 0",)),
        ("row", DataError, ("KeyError", "row 1")),
    ],
)
def test_a_wrong_row_function_is_one_message(write_code, write_rows, tokenizer, name, error, words):
    path = write_rows([{"question": "a", "answer": "#### 1"}, {"question": "b"}])
    with raises(error, *words):
        prompts_of(f"{write_code(RECORD)}:{name}", [path], tokenizer)


# sampler classes -----------------------------------------------------------------------------------------------------

SEEDED = """
import random
class Backwards:
    def __init__(self, data_source, seed):
        self.size, self.seed, self.epoch = len(data_source), seed, 0
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        order = list(range(self.size))
        random.Random(self.seed * 100 + self.epoch).shuffle(order)
        return iter(order)
"""
STATEFUL = """
class Counting:
    def __init__(self, data_source):
        self.size, self.next = len(data_source), 0
    def __iter__(self):
        for _ in range(4):
            row, self.next = self.next % self.size, self.next + 3
            yield row
    def state_dict(self):
        return {"next": self.next}
    def load_state_dict(self, state):
        self.next = state["next"]
"""
OBSERVING = """
class Observing:
    def __init__(self, data_source):
        self.size, self.next, self.place, self.seen = len(data_source), 0, 0, {}
    def __iter__(self):
        while self.place < 4:
            self.place += 1
            row, self.next = self.next % self.size, self.next + 3 + len(self.seen)
            yield row
        self.place = 0
    def observe(self, rates):
        self.seen.update({str(row): rate for row, rate in rates.items()})
    def state_dict(self):
        return {"next": self.next, "place": self.place, "seen": self.seen}
    def load_state_dict(self, state):
        self.next, self.place, self.seen = state["next"], state["place"], state["seen"]
"""
UNSEEDED = """
import os
class Unseeded:
    def __iter__(self):
        return iter([os.urandom(1)[0] % 7 for _ in range(8)])
"""


def sampler_of(path, seed=3, size=7):
    config = DataConfig(train_batch_size=2, sampler=SamplerConfig(class_path=path))
    return make_sampler(config, list(range(size)), seed)


@pytest.mark.parametrize("code", [SEEDED, STATEFUL, OBSERVING])
@pytest.mark.parametrize("steps", range(8))
def test_a_sampler_class_resumes_exactly(write_code, code, steps):
    path = write_code(code)
    sampler = sampler_of(path)
    for step in range(steps):
        sampler.next_batch()
        sampler.observe({step: 0.5})
    state = json.loads(json.dumps(sampler.state_dict()))
    resumed = sampler_of(path)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state and resumed.epoch == sampler.epoch
    assert resumed.learns == (code is OBSERVING)
    assert [resumed.next_batch() for _ in range(9)] == [sampler.next_batch() for _ in range(9)]


def test_a_sampler_that_draws_otherwise_after_a_resume_is_refused(write_code):
    path = write_code(UNSEEDED)
    sampler = sampler_of(path)
    for _ in range(4):
        sampler.next_batch()
    with raises(CheckpointError, "Unseeded", where="data.sampler.class_path"):
        sampler_of(path).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("body", "error", "words"),
    [
        ("def __iter__(self): return iter([0])", DataError, ("1 rows", "data.train_batch_size=1")),
        ("def __iter__(self): return iter([0, 99])", DataError, ("99", "6")),
        ("def __iter__(self): return iter(['a', 'b'])", DataError, ("'a'",)),
        ("def __iter__(self): raise OSError('gone')", DataError, ("OSError", "gone")),
        ("pass", DataError, ("TypeError",)),
        ("def __iter__(self): return iter([0])\n def observe(self, rates): pass", ConfigError, ("state_dict",)),
    ],
)
def test_a_wrong_sampler_class_is_one_message(write_code, body, error, words):
    with raises(error, *words, where="data.sampler.class_path"):
        sampler_of(write_code(f"class S:\n {body}")).next_batch()
