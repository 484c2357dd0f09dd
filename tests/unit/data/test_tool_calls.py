"""Tool calls of datasets: every defect is named in its row, sound rows have none, and cleaning keeps exactly those."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises
from typer.testing import CliRunner

from hone.cli.data import app
from hone.data.checks import check_calls, read_gates
from hone.data.checks.tools import GATES, PROBLEMS
from hone.data.files import Row
from hone.errors import ConfigError

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Return the weather of a city.", "parameters": PARAMETERS}}]  # fmt: skip


def call(arguments: Any = '{"city": "Oslo"}', name: str = "weather", identity: str = "a") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": identity, "type": "function", "function": function}],
    }


def answer(identity: str | None = "a", content: str = "rain") -> dict[str, Any]:
    return (
        {"role": "tool", "tool_call_id": identity, "content": content}
        if identity
        else {"role": "tool", "content": content}
    )


def says(text: str = "It rains.") -> dict[str, Any]:
    return {"role": "assistant", "content": text}


ASK = {"role": "user", "content": "Weather in Oslo?"}
SOUND: dict[str, Any] = {"tools": json.dumps(TOOLS), "messages": [ASK, call(), answer(), says()]}


def planted(kind: str) -> dict[str, Any]:
    row = copy.deepcopy(SOUND)
    changes: dict[str, list[dict[str, Any]]] = {
        "unreadable_arguments": [ASK, call('{"city": '), answer(), says()],
        "unknown_tool": [ASK, call(name="wether"), answer(), says()],
        "unfit_arguments": [ASK, call('{"town": "Oslo"}'), answer(), says()],
        "result_without_call": [ASK, call(), answer(), answer("b"), says()],
        "call_without_result": [ASK, call(), says()],
        "loop": [ASK, *[message for n in "abc" for message in (call(identity=n), answer(n))], says()],
        "long_result": [ASK, call(), answer(content="x" * 3000), says()],
    }
    if kind in changes:
        row["messages"] = changes[kind]
    elif kind == "mute_tool":
        mute = copy.deepcopy(TOOLS)
        mute[0]["function"]["description"] = ""
        row["tools"] = json.dumps(mute)
    else:
        row = {"chosen": [ASK, says()], "rejected": [{"role": "user", "content": "Weather in Rome?"}, says("Sun.")]}
    return row


def kinds(row: dict[str, Any]) -> set[str]:
    check = check_calls([Row("r:0", "row 0", row)], messages_key="messages", limit=2000)
    return {defect.kind for defect in check.defects.get(0, ())}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_every_defect_is_named(kind: str) -> None:
    assert kinds(planted(kind)) == {kind}


@pytest.mark.parametrize(
    "messages",
    [
        [ASK, call(), answer(), says()],
        [ASK, call({"city": "Oslo", "country": None}), answer(), says()],
        [ASK, call(), answer(None), says()],
        [ASK, call()],
        [ASK, call(), answer(), ASK, call(), answer(), says()],
        [{"role": "system", "content": "s"}, ASK, says()],
    ],
)
def test_sound_conversations_have_none(messages: list[dict[str, Any]]) -> None:
    assert kinds({**SOUND, "messages": messages}) == set()
    assert kinds({"chosen": [ASK, says("a")], "rejected": [ASK, says("b")]}) == set()


@given(
    st.lists(
        st.sampled_from(["sound", "unreadable_arguments", "unknown_tool", "unfit_arguments"]), min_size=1, max_size=12
    )
)
@examples(60)
def test_shares_are_those_of_a_direct_count(rows: list[str]) -> None:
    check = check_calls(
        [Row(f"r:{n}", f"row {n}", SOUND if kind == "sound" else planted(kind)) for n, kind in enumerate(rows)],
        messages_key="messages",
        limit=2000,
    )
    assert check.calls == len(rows)
    for name, bad in GATES.items():
        assert check.shares()[name] == pytest.approx(1 - sum(kind in bad for kind in rows) / len(rows))
    assert check.failed_gates({"schema": 1.0}) == (
        [] if set(rows) == {"sound"} else check.failed_gates({"schema": 1.0})
    )
    assert bool(check.failed_gates({"schema": 1.0})) == (set(rows) != {"sound"})


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [*map(str, words)], catch_exceptions=False)


def test_gates_decide_the_exit_code(tmp_path: Path) -> None:
    file = write(tmp_path / "train.jsonl", [SOUND] * 9 + [planted("unfit_arguments")])
    passed = run("check", file, "--gate", "parse=0.99,schema=0.9", "--json")
    report = json.loads(passed.stdout)
    assert passed.exit_code == 0 and report["numbers"]["tool_calls"]["schema_share"] == 0.9
    assert {f["code"] for f in report["findings"]} >= {"R81"}
    assert run("check", file, "--gate", "schema=0.95").exit_code == 2
    with raises(ConfigError, where="--gate"):
        read_gates("speed=1")


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_cleaning_keeps_the_sound_rows(tmp_path: Path, ending: str) -> None:
    bad = [kind for kind in PROBLEMS if PROBLEMS[kind].stops and kind != "different_prompts"]
    rows = [row for kind in bad for row in (SOUND, planted(kind))]
    file = write(tmp_path / "train.jsonl", rows)
    out, rejected = tmp_path / f"clean.{ending}", tmp_path / "rejected.jsonl"
    cleaned = run("clean", file, "--out", out, "--rejected", rejected, "--json")
    counts = json.loads(cleaned.stdout)
    assert (counts["kept"], counts["rejected"]) == (len(bad), len(bad))
    assert counts["reasons"] == dict.fromkeys(bad, 1)
    reasons = [json.loads(line) for line in rejected.read_text().splitlines()]
    assert [entry["reasons"][0]["kind"] for entry in reasons] == bad
    assert [entry["row"] for entry in reasons] == [planted(kind) for kind in bad]
    again = run("check", out, "--gate", "parse=1,schema=1,tool=1")
    assert again.exit_code == 0, again.output
    if ending == "jsonl":
        assert [json.loads(line) for line in out.read_text().splitlines()] == [SOUND] * len(bad)
    allowed = run("clean", file, "--out", out, "--rejected", rejected, "--allow", "loop", "--json")
    assert json.loads(allowed.stdout)["kept"] == len(bad) + 1
