r"""Text that is half of a character (JSON's ``\ud800``) from a model, a tool, a service, a reward or a dataset ends no run."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.agents import call, play, sample, setting
from support.archives import archive, records
from support.templates import tokenizer as template_tokenizer
from typer.testing import CliRunner

from hone.agents.environments.base import ENVIRONMENTS, Environment, Step
from hone.agents.parsers import TOOL_PARSERS
from hone.agents.rendering import renderer_for
from hone.agents.tools import Tool, ToolError, ToolResult
from hone.agents.tools.calculator import Calculator
from hone.cli.main import app
from hone.config.reward import JudgeConfig
from hone.data.episode_log import CallStatus, EpisodeEnd
from hone.data.files import read_rows
from hone.data.messages import schemas_of
from hone.data.prompts import PromptDataset
from hone.errors import DataError
from hone.insight.run_directory import trajectory_record
from hone.insight.run_files import jsonable
from hone.rewards.http import JsonService
from hone.rewards.services import Judge
from hone.rewards.worker import MAX_NESTING, to_score

LONE = "\ud800"
SCHEMA = Calculator().schema
DEEP = '<tool_call>\n{"name": "calculator", "arguments": {"expression": ' + "[" * 600 + "]" * 600 + "}}\n</tool_call>"


def encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=str).encode()


CALLS = {
    "hermes": '<tool_call>{"name": "f\\ud800", "arguments": {"x": ["\\udfff"]}}</tool_call>',
    "hermes, without arguments": '<tool_call>{"name": "f\\ud800"}</tool_call>',
    "llama3_json": '{"name": "f", "parameters": {"\\ud800": 1}}',
    "pythonic": "[f(x='\\ud800')]",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
    '{"x": "\\ud800"}<|tool_call_end|><|tool_calls_section_end|>',
}


@pytest.mark.parametrize("name", CALLS)
def test_a_parsed_call_with_half_a_character_is_malformed(name: str) -> None:
    (parsed,) = TOOL_PARSERS.get(name.partition(",")[0])().parse(CALLS[name]).calls
    assert parsed.arguments is None and parsed.error
    encoded([parsed.name, parsed.raw, parsed.error, parsed.id, parsed.as_openai()])


@pytest.mark.parametrize(
    "attack",
    [
        call("calculator", expression=LONE),
        call("calculator", **{LONE: "1"}),
        call("calculator\\ud800", expression="1"),
        '<tool_call>\n{"name": "\\ud800"}\n</tool_call>',
        DEEP,
    ],
    ids=["argument", "key", "name", "name alone", "nesting"],
)
def test_the_model_is_told_that_its_call_is_malformed(attack: str, tmp_path: Path) -> None:
    (trajectory,), _ = play(
        setting([Calculator()]), lambda name, turn: attack if turn == 0 else "#### 42", [sample(tools=[SCHEMA])],
        max_tokens=2000,
    )  # fmt: skip
    log = trajectory.episode
    assert log is not None and log.end is EpisodeEnd.ANSWER and log.retries == 0
    assert [record.status for record in log.calls] == [CallStatus.MALFORMED]
    archive(tmp_path, 1, [trajectory_record(trajectory, score=0.0)])


def test_a_malformed_call_in_the_history_is_rendered_as_text() -> None:
    renderer = renderer_for(template_tokenizer("qwen2_5"))
    turn = TOOL_PARSERS.get("hermes")().parse('<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>')
    raw_arguments = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "\\ud800"}'}}
    for message in (turn.message(), {"role": "assistant", "content": "", "tool_calls": [raw_arguments]}):
        assert renderer.prompt([{"role": "user", "content": "?"}, message, {"role": "user", "content": "!"}])
    with pytest.raises(DataError):
        renderer.prompt([{"role": "user", "content": LONE}])


@pytest.mark.parametrize(
    "attack",
    [
        f"[f(x={'-' * 600}1)]",
        f"[{'a.' * 600}f(x=1)]",
        f"[f{'(1)' * 600}]",
        f"[f(x={'1+' * 600}1)]",
        f"[f(x=0x{'f' * 5000})]",
    ],
    ids=["signs", "names", "calls", "sum", "digits"],
)
@pytest.mark.parametrize(
    "limit", [1_000, 20_000]
)  # libraries raise Python's limit: what is malformed may not depend on it
def test_a_call_that_python_cannot_walk_through_is_malformed(attack: str, limit: int) -> None:
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    try:
        (parsed,) = TOOL_PARSERS.get("pythonic")().parse(attack).calls
    finally:
        sys.setrecursionlimit(usual)
    assert parsed.arguments is None and parsed.error
    encoded(parsed.as_openai())


class Lookup(Tool):
    """Returns, raises or refuses with half a character."""

    def __init__(self, way: str) -> None:
        super().__init__({"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}})
        self.way, self.retries = way, 0

    async def execute(self, state: Any, arguments: Any, **kwargs: Any) -> Any:
        if self.way == "text":
            return f"half {LONE}"
        if self.way == "parts":
            return [{"type": "text", "text": LONE}]
        if self.way == "data":
            return {LONE: [LONE]}
        if self.way == "result":
            return ToolResult(LONE)
        raise (ToolError if self.way == "refusal" else ValueError)(f"half {LONE}")


@pytest.mark.parametrize("way", ["text", "parts", "data", "result", "refusal", "error"])
def test_a_tools_result_is_repaired(way: str) -> None:
    tool = Lookup(way)
    (trajectory,), engine = play(
        setting([tool]), lambda name, turn: call("lookup") if turn == 0 else "done", [sample(tools=[tool.schema])]
    )
    log = trajectory.episode
    assert log is not None and log.end is EpisodeEnd.ANSWER and "\ufffd" in log.calls[0].result
    assert "\ufffd" in template_tokenizer("qwen2_5").decode(engine.requests[1].prompt_ids)
    encoded(log.summary())


@ENVIRONMENTS.register("halves")
class Halves(Environment):
    """Observes half a character."""

    async def reset(self, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": "What is 6*7?"}]

    async def step(self, turn: Any) -> Step:
        return Step.says(f"half {LONE}", done=turn.content == "done")


def test_an_observation_is_repaired() -> None:
    row = sample(agent_name="environment", environment={"name": "halves", "seed": 1})
    (trajectory,), engine = play(setting(), lambda name, turn: "go" if turn == 0 else "done", [row])
    assert trajectory.episode is not None and trajectory.episode.end is EpisodeEnd.DONE
    assert "\ufffd" in template_tokenizer("qwen2_5").decode(engine.requests[1].prompt_ids)


def test_extras_of_a_reward_are_written(tmp_path: Path) -> None:
    score = to_score({"score": 1.0, "note": LONE, f"key{LONE}": {LONE: [LONE]}, f"term{LONE}": 2.0})
    assert score.total == 1.0 and score.error is None and set(score.terms) == {"term\ufffd"}
    encoded([score.extra, score.terms])
    archive(tmp_path, 1, [{"text": LONE, "extra": {"note": LONE}, "messages": [{"content": LONE}]}])
    (row,) = records(tmp_path, 1)
    assert (row["text"], row["extra"], row["messages"]) == ("\ufffd", {"note": "\ufffd"}, [{"content": "\ufffd"}])


def test_a_deep_extra_of_a_reward_is_written(tmp_path: Path) -> None:
    extra: Any = "end"
    for _ in range(400):
        extra = [extra]
    score = to_score({"score": 1.0, "note": extra})
    archive(tmp_path, 1, [{"extra": jsonable_from_deep_stack(score.extra)}])
    (row,) = records(tmp_path, 1)
    assert row["extra"] == score.extra
    levels, value = 0, row["extra"]["note"]
    while isinstance(value, list):
        levels, (value,) = levels + 1, value
    assert levels == MAX_NESTING + 1 and isinstance(value, str) and value != "end"


def jsonable_from_deep_stack(value: Any, frames: int = 300) -> Any:
    """Convert as a driver does, whose stack is deeper than a worker's."""
    return jsonable_from_deep_stack(value, frames - 1) if frames else jsonable(value)


@pytest.mark.parametrize("row", ["[" * 5000 + "]" * 5000, "9" * 5000], ids=["nesting", "digits"])
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_that_python_cannot_read_is_refused(tmp_path: Path, row: str, suffix: str) -> None:
    path = tmp_path / f"train{suffix}"
    path.write_text('{"prompt": ' + row + "}\n")
    with pytest.raises(DataError) as caught:
        read_rows(path, required=("prompt",))
    assert caught.value.where == str(path)


@pytest.fixture
def service() -> Iterator[str]:
    """A server whose every answer has half a character, also as a judge."""
    answer = json.dumps(
        {"score": 1.0, "note": LONE, "choices": [{"message": {"content": f"{LONE} Score: 5"}}]}
    ).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"])).decode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_answers_of_services_are_repaired(service: str, tmp_path: Path) -> None:
    async def ask() -> Any:
        client = JsonService(service)
        try:
            return await client.post("", {"solution_str": f"half {LONE}"})
        finally:
            await client.close()

    answer = asyncio.run(ask())
    assert answer["note"] == "\ufffd"
    judge = Judge(JudgeConfig(base_url=service, model="m", cache=str(tmp_path / "cache")), timeout=10.0)
    judgement = asyncio.run(judge.judge("?", f"half {LONE}", LONE))
    encoded(judgement.text)
    judge.close()


def write_row(path: Path, **values: Any) -> Path:
    rows = [{"prompt": "fine", "data_source": "exact_match", "reward_model": {"ground_truth": "1"}}] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0] | values]))
    return path


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": LONE},
        {"prompt": [{"role": "user", "content": f"a {LONE}"}]},
        {"reward_model": {"ground_truth": LONE}},
        {"extra_info": {"a": [{LONE: 1}]}},
    ],
    ids=["text", "messages", "truth", "key"],
)
def test_a_dataset_row_is_refused_with_file_and_number(values: dict[str, Any], tmp_path: Path) -> None:
    path = write_row(tmp_path / "train.jsonl", **values)
    with pytest.raises(DataError) as caught:
        PromptDataset(
            [path], template_tokenizer("qwen2_5"), prompt_key="prompt", reward_fn_key="data_source",
            max_prompt_length=64, truncation="error",
        )  # fmt: skip
    assert caught.value.where == f"{path}, row 2"
    checked = CliRunner().invoke(app, ["data", "check", str(path)])
    error = checked.exception
    assert isinstance(error, DataError) and error.where == f"{path}, row 2"


def test_parquet_and_tools_as_json_text_are_refused_too(tmp_path: Path) -> None:
    text = pa.array([b"fine"] * 5000 + [b"a\xed\xa0\x80b"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), len(text), text.buffers())
    pq.write_table(pa.table({"prompt": column}), tmp_path / "bad.parquet")
    with pytest.raises(DataError) as caught:
        read_rows(tmp_path / "bad.parquet", required=("prompt",))
    assert caught.value.where == f"{tmp_path / 'bad.parquet'}, row 5000"
    with pytest.raises(DataError) as caught:
        schemas_of('[{"type": "function", "function": {"name": "\\ud800"}}]', "f.jsonl, row 3")
    assert caught.value.where == "f.jsonl, row 3"
