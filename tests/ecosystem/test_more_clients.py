"""Further client libraries, of Python and JavaScript, against `hone serve`: chats, streams, tools and structured output."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.environments import foreign_python, npm_folder
from support.once import made_once
from support.patience import LONG

pytestmark = pytest.mark.long("hone/agents/serving")
FOREIGN = Path(__file__).parents[1] / "support" / "foreign"
PYTHON = {
    "llama-index": ("llama-index-llms-openai-like==0.8.1", "llama-index-core==0.14.25"),
    "dspy": ("dspy==3.4.1", "litellm==1.110.2"),
    "instructor": ("instructor==1.17.0",),
}
JAVASCRIPT = ("openai", "ai")
NODE_PACKAGES = ("openai@7.59.0", "ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
CLIENTS = (*PYTHON, *JAVASCRIPT)
Results = Callable[[str], dict[str, Any]]


def program(client: str, url: str) -> tuple[list[str], Path | None]:
    """The command that uses a client, and its working directory."""
    arguments = [client, f"{url}/v1", "smollm2"]
    if client in PYTHON:
        python = foreign_python(f"client-{client}", *PYTHON[client])
        return [python, str(FOREIGN / "openai_clients.py"), *arguments], None
    folder, node = npm_folder("clients", *NODE_PACKAGES), shutil.which("node")
    if node is None:
        pytest.skip("node is missing")
    return [node, str(FOREIGN / "openai_clients.mjs"), *arguments], folder


@pytest.fixture(scope="module")
def results(url: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What the four uses of a client gave; its process runs once for all test processes."""

    def run(client: str, folder: Path) -> None:
        command, directory = program(client, url)
        environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "DSPY_CACHEDIR": str(folder / "cache")}
        environment.pop("PYTHONPATH", None)
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LONG, cwd=directory)
        assert ran.returncode == 0, ran.stderr
        (folder / "results.json").write_text(ran.stdout.splitlines()[-1])

    def given(client: str) -> dict[str, Any]:
        folder = made_once(tmp_path_factory, f"more-client-{client}", functools.partial(run, client))
        return json.loads((folder / "results.json").read_text())

    return given


@pytest.mark.parametrize("client", CLIENTS)
def test_every_use_of_a_client_works(results: Results, client: str) -> None:
    given = results(client)
    assert {case for case in given if "error" in given[case]} == set(), given
    chat, stream, tools, structure = (given[case]["result"] for case in ("chat", "stream", "tools", "structure"))
    assert "Rome" in chat
    assert "".join(stream) == chat and sum(map(bool, stream)) > 2
    assert tools["city"] in ("Rome", "Paris") and tools["answer"].strip()
    assert structure["city"] in ("Rome", "Paris") and isinstance(structure["sunny"], bool)
