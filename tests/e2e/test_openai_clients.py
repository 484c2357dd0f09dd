"""Official client libraries against `hone serve` with a pretrained model: chats, streams, tools and structured output."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from support.environments import foreign_python
from support.forked_python import Forks
from support.once import made_once
from support.patience import LONG
from support.real_model import smollm2
from support.serve import serving

pytestmark = pytest.mark.long("hone/agents/serving")
SCRIPT = Path(__file__).parents[1] / "support" / "foreign" / "openai_clients.py"
PACKAGES = (
    "openai==3.57.0",
    "litellm==1.110.2",
    "langchain-openai==1.7.4",
    "pydantic-ai-slim[openai]==2.68.0",
    "openai-agents==0.24.0",
    "anthropic==2.14.0",
)
CLIENTS = ("openai", "litellm", "langchain-openai", "pydantic-ai", "openai-agents", "anthropic")
NAME = "smollm2"
ANSWERS = 100
FORECAST: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def url(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], str]]:
    """The address of the server, which starts when it is first needed."""
    with contextlib.ExitStack() as stack:

        def start() -> str:
            log = tmp_path_factory.mktemp("clients") / "log"
            options = ("--name", NAME, "--max-model-len", "2048")
            return f"{stack.enter_context(serving(forks, smollm2(tmp_path_factory), log, *options))}/v1"

        yield functools.cache(start)


@pytest.fixture(scope="module")
def results(url: Callable[[], str], tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the four uses of a client gave; its process runs once for all test processes."""

    def run(client: str, folder: Path) -> None:
        python = foreign_python("openai-clients", *PACKAGES)
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        environment.pop("PYTHONPATH", None)
        command = [python, str(SCRIPT), client, url(), NAME]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG)
        assert ran.returncode == 0, ran.stderr
        (folder / "results.json").write_text(ran.stdout.splitlines()[-1])

    def given(client: str) -> dict[str, Any]:
        folder = made_once(tmp_path_factory, f"client-{client}", functools.partial(run, client))
        return json.loads((folder / "results.json").read_text())

    return given


def result(results: Results, client: str, case: str) -> Any:
    given = results(client)[case]
    assert "result" in given, given["error"]
    return given["result"]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_chat(results: Results, client: str) -> None:
    assert "Rome" in result(results, client, "chat")


@pytest.mark.parametrize("client", CLIENTS)
def test_a_stream_gives_the_text_of_the_chat_in_pieces(results: Results, client: str) -> None:
    pieces = result(results, client, "stream")
    assert "".join(pieces) == result(results, client, "chat")
    assert sum(map(bool, pieces)) > 2


@pytest.mark.parametrize("client", CLIENTS)
def test_a_tool_is_called_and_its_result_answered(results: Results, client: str) -> None:
    given = result(results, client, "tools")
    assert given["city"] in ("Rome", "Paris") and given["answer"].strip()


@pytest.mark.parametrize("client", CLIENTS)
def test_structured_output_has_the_structure(results: Results, client: str) -> None:
    given = result(results, client, "structure")
    assert given["city"] in ("Rome", "Paris") and isinstance(given["sunny"], bool)


def test_every_required_call_is_valid(url: Callable[[], str]) -> None:
    client = openai.OpenAI(base_url=url(), api_key="none", max_retries=0, timeout=LONG)
    tool: Any = {"type": "function", "function": {"name": "forecast", "parameters": FORECAST}}
    answer = client.chat.completions.create(
        model=NAME,
        messages=[{"role": "user", "content": "What will the weather be like in Oslo?"}],
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        n=ANSWERS,
        seed=0,
        max_tokens=128,
    )
    assert len(answer.choices) == ANSWERS
    for choice in answer.choices:
        (call,) = choice.message.tool_calls or ()
        assert (choice.finish_reason, call.function.name) == ("tool_calls", "forecast")
        jsonschema.validate(json.loads(call.function.arguments), FORECAST)
    assert len({choice.message.tool_calls[0].function.arguments for choice in answer.choices}) > ANSWERS / 4
