"""Rules about all rows of a dataset, with invalid and valid rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.preflight import change, rows, write_rows

from hone.config import RLConfig, SFTConfig
from hone.preflight import findings
from hone.preflight.evidence import Evidence
from hone.preflight.plan.batch import training_rows


def broken(at: dict[int, dict[str, Any]], count: int = 10) -> list[dict[str, Any]]:
    """Return valid rows, some with changed columns."""
    content = rows(count)
    for number, columns in at.items():
        content[number] = {name: value for name, value in (content[number] | columns).items() if value != "LEFT OUT"}
    return content


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


CASES: list[tuple[dict[int, dict[str, Any]], str, bool, list[str]]] = [
    ({3: {"prompt": []}, 4: {"prompt": None}}, "R42", True, ["row 3", "2 of 10 rows", "hone data clean"]),
    ({7: {"prompt": 5}}, "R42", True, ["row 7", "1 of 10", "int"]),
    ({7: {"prompt": [{"role": "user"}]}}, "R42", True, ["row 7", "prompt[0]", "'content'"]),
    ({2: {"prompt": [{"role": "usr", "content": "a"}]}}, "R42", True, ["'usr'", "user"]),
    (
        {2: {"prompt": [user("a"), {"role": "system", "content": "b"}]}},
        "R42",
        False,
        ["system message", "first"],
    ),
    ({2: {"prompt": [user("a"), assistant("b")]}}, "R42", False, ["assistant message"]),
    ({2: {"prompt": [user("a"), user("b")]}}, "R42", False, ["messages 0 and 1"]),
    ({2: {"prompt": [user("a"), {"role": "tool", "content": "b"}]}}, "R42", False, ["tool call"]),
    ({2: {"prompt": [user("  ")]}}, "R42", False, ["user message"]),
    ({2: {"data_source": 7}}, "R42", True, ["7"]),
    ({5: {"reward_model": "42"}}, "R44", True, ["1 of 10", "ground_truth"]),
    (
        {5: {"data_source": "gsm9k"}, 6: {"data_source": "gsm9k"}},
        "R43",
        True,
        ["'gsm9k' (2 rows)", "gsm8k", "reward.scorer=NAME"],
    ),
    (
        {1: {"reward_model": {"ground_truth": ""}}, 2: {"reward_model": {}}, 3: {"reward_model": "LEFT OUT"}},
        *("R44", True, ["row 1", "3 of 10 rows", "ground_truth"]),
    ),
    (
        {1: {"data_source": "countdown", "reward_model": {"ground_truth": "forty"}}},
        *("R44", True, ["'forty'", "row 1"]),
    ),
    (
        {number: {"prompt": [user("1 + 1 = ?")]} for number in range(1, 4)},
        *("R47", False, ["2 of 10 training prompts (20%)", "3 times"]),
    ),
    ({4: {"agent_name": "tool_agnt"}}, "R48", True, ["'tool_agnt' (1 of 10 rows)", "tool_agent"]),
    ({4: {"agent_name": "environment"}}, "R33", True, ["environment (1 rows)", "multi_turn.enable=false"]),
    (
        {4: {"extra_info": {"tools_kwargs": {"calc": {"x": 1}}}}},
        *("R48", True, ["'calc'"]),
    ),
    (
        {4: {"tools": [{"type": "function", "function": {"name": "calc"}}]}},
        *("R33", True, ["1 of 10 training rows", "tools"]),
    ),
]


@pytest.mark.parametrize(("at", "code", "stops", "words"), CASES)
def test_row_rules(
    rl: RLConfig, data: Path, at: dict[int, dict[str, Any]], code: str, stops: bool, words: list[str]
) -> None:
    write_rows(data, broken(at))
    rl.preflight.reward_rows = 0
    finding = [f for f in findings(rl) if f.error.code == code]
    assert [f.stops for f in finding] == [stops], [f.error.render() for f in findings(rl)]
    assert finding[0].error.fix and finding[0].error.why
    for word in words:
        assert word in finding[0].error.render()


@pytest.mark.parametrize(
    "at",
    [
        {2: {"prompt": "1 + 1 ="}},
        {2: {"prompt": [5, 6, 7]}},
        {2: {"prompt": [{"role": "system", "content": "b"}, user("a")]}},
        {2: {"prompt": [user("a"), assistant("b"), user("c")]}},
        {2: {"reward_model": {"ground_truth": ["2", "two"]}}},
        {2: {"data_source": "exact_match"}},
        {2: {"agent_name": "single_turn_agent"}},
        {2: {"extra_info": {"tools_kwargs": {"calc": None}}}},
    ],
)
def test_row_rules_have_no_findings(rl: RLConfig, data: Path, at: dict[int, dict[str, Any]]) -> None:
    write_rows(data, broken(at))
    assert [f.error.render() for f in findings(rl)] == []


def test_parquet_with_nested_columns_is_read_alike(rl: RLConfig, tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(rows()), tmp_path / "train.parquet")
    rl.data.train_files = str(tmp_path / "train.parquet")
    assert [f.error.render() for f in findings(rl)] == []


def test_a_custom_function_does_not_need_ground_truths(rl: RLConfig, data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return len(solution_str) % 7 / 7\n"
    )
    change(rl, {"reward.custom_reward_function.path": str(tmp_path / "own.py")})
    write_rows(data, broken({number: {"reward_model": {}} for number in range(10)}))
    assert [f.error.code for f in findings(rl)] == []
    write_rows(data, broken({number: {"reward_model": {}} for number in range(4)}))
    some = [f for f in findings(rl) if f.error.code == "R44"]
    assert len(some) == 1 and not some[0].stops and "4 of 10 rows" in some[0].error.what


OWN = """
from xml.etree import ElementTree

class Items:
    def __init__(self, data_files, tokenizer):
        tokenizer("a class may use it")
        roots = [ElementTree.parse(file).getroot() for file in data_files]
        self.items = [item for root in roots for item in root] or [ElementTree.fromstring(f"<i a='{n}'>{n}?</i>") for n in range(10)]
    def __len__(self):
        return len(self.items)
    def __getitem__(self, number):
        item = self.items[number]
        return row({"question": item.text, "answer": item.get("a")})

def row(record):
    return {
        "prompt": [{"role": "user", "content": record["question"]}], "data_source": "exact_match",
        "reward_model": {"ground_truth": record["answer"]},
    }
"""


@pytest.mark.parametrize("files", ["items.xml", "unknown.xml", None])
def test_rows_of_a_class_are_checked_in_place_of_its_files(rl: RLConfig, tmp_path: Path, files: str | None) -> None:
    """A class reads what it likes, also nothing."""
    (tmp_path / "own.py").write_text(OWN)
    items = "".join(f"<i a='{n}'>{n} + 0?</i>" for n in range(10))
    (tmp_path / "items.xml").write_text(f"<all>{items}</all>")
    change(rl, {"data.custom_cls.path": str(tmp_path / "own.py")})
    rl.data.train_files = files and str(tmp_path / files)
    assert [f.error.code for f in findings(rl)] == ["R42"] * (files == "unknown.xml"), (
        "without files of validation, none is read"
    )
    if files != "unknown.xml":
        assert training_rows(rl, Evidence(rl).read_rows) == 10
    (tmp_path / "items.xml").write_text(f"<all><i/>{items}</all>")
    codes = {f.error.code for f in findings(rl)}
    assert ({"R42", "R44"} <= codes) == (files == "items.xml"), "a row without a question and an answer"


def test_rows_of_a_function_are_checked_in_place_of_its_records(rl: RLConfig, data: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    write_rows(data, [{"question": f"{n} + 0?", "answer": str(n)} for n in range(10)])
    assert [f.error.code for f in findings(rl) if f.stops] == ["R42"]
    change(rl, {"data.row_fn": f"{tmp_path}/own.py:row"})
    assert [f.error.render() for f in findings(rl)] == []
    change(rl, {"data.row_fn": f"{tmp_path}/own.py:rows"})
    assert {(f.error.code, f.error.where) for f in findings(rl) if f.stops} == {("R42", "data.row_fn")}


def test_a_batch_that_the_rows_do_not_fill(rl: RLConfig) -> None:
    change(rl, {"data.train_batch_size": 16})
    (finding,) = findings(rl)
    assert (
        finding.error.code == "R46" and "10 rows" in finding.error.what and "train_batch_size=10" in finding.error.fix
    )


def test_validation_that_occurs_in_training(rl: RLConfig, tmp_path: Path) -> None:
    content = rows(14)[8:]
    rl.data.val_files = str(write_rows(tmp_path / "val.jsonl", content))
    (finding,) = findings(rl)
    assert finding.error.code == "R47" and not finding.stops
    assert "2 of 6 validation prompts (33%)" in finding.error.what
    write_rows(tmp_path / "val.jsonl", content[2:])
    assert list(findings(rl)) == []


def test_rare_data_sources(rl: RLConfig, data: Path) -> None:
    write_rows(data, broken({0: {"data_source": "exact_match"}}, count=200))
    (finding,) = findings(rl)
    assert (
        finding.error.code == "R47" and "'exact_match' (1)" in finding.error.what and "8 prompts" in finding.error.why
    )


@pytest.mark.parametrize(
    ("messages", "stops", "words"),
    [
        ([user("a")], True, ["assistant message"]),
        ([user("a"), assistant("b"), user("c")], False, ["assistant message"]),
        ("text", True, ["str"]),
    ],
)
def test_conversations(sft: SFTConfig, data: Path, messages: Any, stops: bool, words: list[str]) -> None:
    write_rows(data, broken({6: {"messages": messages}}))
    finding = [f for f in findings(sft) if f.error.code == "R42"]
    assert [f.stops for f in finding] == [stops] and "row 6" in finding[0].error.where
    for word in words:
        assert word in finding[0].error.render()


@pytest.mark.parametrize(
    ("sampler", "code", "words"),
    [
        ({"name": "mixture"}, "R42", ["data.sampler.weights={exact:1}"]),
        ({"name": "mixture", "weights": {"gsm8k": 1.0}}, "R42", ["'gsm8k'"]),
        ({"name": "difficulty"}, "R42", ["extra_info.difficulty is None", "data.sampler.difficulty_key=NAME"]),
        ({"weights": {"exact": 1.0}}, "R23", ["data.sampler.name=epoch", "data.sampler.name=mixture"]),
        ({"difficulty_key": "level"}, "R23", ["data.sampler.name=difficulty"]),
        ({"pass_rate_of": "data_source"}, "R23", ["data.sampler.name=pass_rate"]),
        ({"name": "pass_rate", "pass_rate_of": "difficulty"}, "R42", ["extra_info.difficulty is None"]),
        ({"keep_earlier": 0.1}, "R23", ["data.sampler.name=stages"]),
        ({"name": "stages"}, "R82", ["0 stages", "data.sampler.stages"]),
        (
            {"name": "stages", "stages": [{"name": "a", "success": 1.5}, {"name": "b"}]},
            "R82",
            ["success=1.5", "data.sampler.stages[0]"],
        ),
        (
            {"name": "stages", "stages": [{"name": "a", "success": 0.5}, {"name": "b", "rows": {"level": [1, 2]}}]},
            "R82",
            ["'b'", "0 of 10 rows", "level None"],
        ),
    ],
)
def test_samplers(rl: RLConfig, sampler: dict[str, Any], code: str, words: list[str]) -> None:
    change(rl, {f"data.sampler.{name}": value for name, value in sampler.items()})
    (finding,) = findings(rl)
    assert finding.error.code == code and finding.stops
    for word in words:
        assert word in finding.error.render()


def test_samplers_that_fit(rl: RLConfig, data: Path) -> None:
    change(rl, {"data.sampler.name": "mixture", "data.sampler.weights": {"exact": 2.0}})
    assert list(findings(rl)) == []
    write_rows(data, broken({number: {"extra_info": {"level": number}} for number in range(10)}))
    change(rl, {"data.sampler.name": "difficulty", "data.sampler.weights": {}, "data.sampler.difficulty_key": "level"})
    assert list(findings(rl)) == []
    change(rl, {"data.sampler.name": "pass_rate", "data.sampler.pass_rate_of": "difficulty"})
    assert list(findings(rl)) == []
    stages = [{"name": "low", "rows": {"level": [0, 1]}, "success": 0.5}, {"name": "all"}]
    plain = {"data.sampler.pass_rate_of": "row", "data.sampler.difficulty_key": "difficulty"}
    change(rl, plain | {"data.sampler.name": "stages", "data.sampler.stages": stages, "data.sampler.keep_earlier": 0.2})
    assert list(findings(rl)) == []
    change(rl, {"data.sampler.name": "pass_rate", "data.sampler.stages": [], "data.sampler.keep_earlier": 0.0})
    change(rl, {"data.shuffle": False})
    assert [(f.error.code, f.stops) for f in findings(rl)] == [("R23", False)]


def test_scorers_without_a_truth_and_terms_need_neither_source_nor_ground_truth(rl: RLConfig, tmp_path: Path) -> None:
    content = [row | {"data_source": "chat", "reward_model": {}} for row in rows(10)]
    files = {"data.train_files": str(write_rows(tmp_path / "chats.jsonl", content)), "preflight.reward_rows": 0}

    def codes(**changes: Any) -> list[str]:
        return [finding.error.code for finding in findings(change(rl, files | changes))]

    assert codes() == ["R43", "R44"]
    assert codes(**{"reward.scorer": "gsm8k"}) == ["R44"]
    assert codes(**{"reward.scorer": "repetition"}) == []
    assert codes(**{"reward.terms": [{"scorer": "length"}, {"scorer": "format"}]}) == []
