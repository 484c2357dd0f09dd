"""inspect-ai of the UK AI Security Institute against `hone serve`: chats, choices, tools and answers with a format."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.environments import foreign_python
from support.patience import LONG

pytestmark = pytest.mark.long("hone/agents/serving")
PACKAGES = ("inspect-ai==0.3.285", "openai==3.57.0")
TASKS = Path(__file__).parents[1] / "support" / "foreign" / "inspect_tasks.py"
CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Spain": "Madrid"}
Evaluate = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluate(url: str, tmp_path: Path) -> Evaluate:
    """Run a task; returns its log."""
    python = foreign_python("inspect-ai", *PACKAGES)
    cities = list(CAPITALS.values())[:3]
    rows = [
        {
            "question": f"What is the capital of {country}?",
            "answer": city,
            "cities": cities,
            "letter": "ABC"[cities.index(city)] if city in cities else "A",
        }
        for country, city in CAPITALS.items()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(name: str, *options: str) -> dict[str, Any]:
        logs = tmp_path / "logs"
        environment = {**os.environ, "HONE_API_KEY": "none", "HONE_BASE_URL": f"{url}/v1", "HOME": str(tmp_path)}
        environment.pop("PYTHONPATH", None)
        command = [
            str(Path(python).parent / "inspect"),
            "eval",
            f"{TASKS}@{name}",
            "-T",
            f"rows={tmp_path / 'rows.jsonl'}",
        ]
        command += ["--model", "openai-api/hone/smollm2", "--log-format", "json", "--log-dir", str(logs)]
        ran = subprocess.run(
            [*command, "--display", "plain", *options],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONG,
            cwd=tmp_path,
        )
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
        (path,) = logs.glob("*.json")
        log = json.loads(path.read_text())
        assert log["status"] == "success", log["error"]
        assert len(log["samples"]) == len(CAPITALS) and not any(sample.get("error") for sample in log["samples"])
        return log

    return run


def said(sample: dict[str, Any]) -> str:
    content = sample["output"]["choices"][0]["message"]["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def accuracy(log: dict[str, Any]) -> float:
    return log["results"]["scores"][0]["metrics"]["accuracy"]["value"]


@pytest.mark.parametrize("options", [(), ("-M", "stream=true"), ("-M", "responses_api=true")])
def test_chats_are_scored(evaluate: Evaluate, options: tuple[str, ...]) -> None:
    log = evaluate("chat", *options)
    right = [sample["target"] in said(sample) for sample in log["samples"]]
    assert accuracy(log) == sum(right) / len(right) >= 0.5
    usage = log["stats"]["model_usage"]["openai-api/hone/smollm2"]
    assert 0 < usage["output_tokens"] <= 16 * len(CAPITALS) < usage["input_tokens"]


def test_choices_are_scored(evaluate: Evaluate) -> None:
    log = evaluate("choices")
    assert 0 <= accuracy(log) <= 1 and all(said(sample) for sample in log["samples"])


@pytest.mark.parametrize("options", [(), ("-M", "stream=true"), ("-M", "responses_api=true")])
def test_a_required_tool_is_called(evaluate: Evaluate, options: tuple[str, ...]) -> None:
    for sample in evaluate("tools", *options)["samples"]:
        roles = [message["role"] for message in sample["messages"]]
        assert roles[:3] == ["user", "assistant", "tool"], sample["messages"]
        (call,) = sample["messages"][1]["tool_calls"]
        assert call["function"] == "look_up" and set(call["arguments"]) == {"country"}
        assert sample["messages"][2].get("error") is None


def test_an_answer_has_the_schema_and_log_probs(evaluate: Evaluate) -> None:
    for sample in evaluate("structure")["samples"]:
        (choice,) = sample["output"]["choices"]
        assert choice["stop_reason"] == "max_tokens" or set(json.loads(said(sample))) == {"city"}
        assert all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in choice["logprobs"]["content"])
