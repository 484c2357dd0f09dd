"""The Berkeley function calling leaderboard (bfcl-eval, its data from its wheel) against `hone serve`: calls are graded, nothing fails."""

from __future__ import annotations

import copy
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.environments import foreign_python, wheel_folder
from support.forked_python import Forks
from support.patience import LONG
from support.scripted import ScriptedEngine, served
from support.serve import serving
from support.templates import tokenizer

pytestmark = pytest.mark.long("hone/agents/serving")
PACKAGE = "bfcl-eval==2026.3.23"
# of what it depends on, all but sentence-transformers and faiss, which its memory tasks alone use: they would bring another torch
NEEDED = (
    *("requests", "tqdm", "numpy", "pandas", "huggingface_hub", "pydantic", "python-dotenv", "openai==3.57.0", "overrides"),
    *("tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4", "mistralai==1.7.0", "anthropic"),
    *("cohere==5.18.0", "typer", "tabulate", "google-genai", "tenacity", "writer-sdk", "boto3", "beautifulsoup4", "html2text"),
    *("rank_bm25==0.2.2", "google-search-results", "networkx", "filelock", "mpmath", "datamodel-code-generator"),
    *("qwen-agent", "soundfile"),
)  # fmt: skip
SERVED = "gpt-4.1-2025-04-14"
"""A model that bfcl-eval knows; it asks for it by the Responses API, at OPENAI_BASE_URL."""
CASES = {
    "simple_python": ["simple_python_0", "simple_python_1"],
    "irrelevance": ["irrelevance_0", "irrelevance_1"],
}
CALLS = {  # the answers of its own file
    "base of 10 units": {"name": "calculate_triangle_area", "arguments": {"base": 10, "height": 5}},
    "factorial of 5": {"name": "math_factorial", "arguments": {"number": 5}},
}


def graded(url: str, folder: Path, model: str) -> tuple[dict[str, list[Any]], dict[str, dict[str, Any]]]:
    """Answers and scores of each category, when bfcl-eval has asked for them and graded them."""
    python = foreign_python("bfcl-eval", *NEEDED)
    environment = {
        **os.environ,
        "PYTHONPATH": str(wheel_folder(PACKAGE)),
        "BFCL_PROJECT_ROOT": str(folder),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": "none",
        "HOME": str(folder),
    }
    folder.mkdir()
    (folder / "test_case_ids_to_generate.json").write_text(json.dumps(CASES))
    for words in (
        ["generate", "--model", model, "--run-ids", "--num-threads", "2"],
        ["evaluate", "--model", model, "--test-category", ",".join(CASES), "--partial-eval"],
    ):
        ran = subprocess.run(
            [python, "-m", "bfcl_eval", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONG,
            cwd=folder,
        )
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    answers, scores = {}, {}
    for category in CASES:
        (file,) = (folder / "result").rglob(f"*_{category}_result.json")
        answers[category] = [json.loads(line)["result"] for line in file.read_text().splitlines()]
        (file,) = (folder / "score").rglob(f"*_{category}_score.json")
        scores[category] = json.loads(file.read_text().splitlines()[0])
    return answers, scores


@pytest.mark.parametrize("name", [f"{SERVED}-FC", SERVED])
def test_a_pretrained_model_is_graded(model: Path, forks: Forks, tmp_path: Path, name: str) -> None:
    options = ("--name", SERVED, "--max-model-len", "1024", "--dtype", "float32")
    with serving(forks, model, tmp_path / "log", *options) as url:
        answers, scores = graded(url, tmp_path / "bfcl", name)
    assert not any("Error during inference" in str(answer) for each in answers.values() for answer in each), answers
    assert {category: score["total_count"] for category, score in scores.items()} == dict.fromkeys(CASES, 2)
    if name != SERVED:  # an answer in words is right where no function fits
        in_words = sum(isinstance(answer, str) for answer in answers["irrelevance"])
        assert scores["irrelevance"]["correct_count"] == in_words


def test_right_calls_are_right(tmp_path: Path) -> None:
    words = copy.deepcopy(tokenizer("qwen2_5"))

    def script(request: Any) -> list[int]:
        asked = words.decode(request.prompt_ids)
        calls = [json.dumps(call) for question, call in CALLS.items() if question in asked]
        text = "".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) or "No function does that."
        return words(f"{text}<|im_end|>", add_special_tokens=False)["input_ids"]

    with served(ScriptedEngine(script), words, model=SERVED) as (url, _):
        answers, scores = graded(url, tmp_path / "bfcl", f"{SERVED}-FC")
    assert {category: score["accuracy"] for category, score in scores.items()} == dict.fromkeys(CASES, 1.0), answers
