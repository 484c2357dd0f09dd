"""`hone serve --replicas`: one endpoint over engines in processes of their own, one of them drained, another one killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import psutil
import pytest
from support import forked_engines
from support.launch import Command
from support.messages import mentioned
from support.patience import SOON
from support.templates import tokenizer
from support.tool_model import NAME, make_tool_model

pytestmark = pytest.mark.long("hone/agents/serving", "hone/generation/pool")
TOKENIZER = tokenizer(NAME)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Command, str]]:
    folder = tmp_path_factory.mktemp("serve")
    model = make_tool_model(folder / "weather")
    words = ["serve", model, "--name", "weather", "--port", 0, "--replicas", 2]
    command = Command(words, folder / "log", folder, prepare=forked_engines.install)

    def address() -> re.Match[str] | None:
        return re.search(r"serving .* at (http://[\d.:]+)/v1", command.log.read_text() if command.log.exists() else "")

    assert command.wait_until(lambda: address() is not None) and (found := address())
    yield command, found[1]
    processes = psutil.Process(command.process.pid).children(recursive=True)
    command.signal(signal.SIGTERM)
    command.wait()
    assert not psutil.wait_procs(processes, timeout=SOON)[1], "nothing is left running"


def told(url: str, path: str, method: str = "GET") -> Any:
    with urllib.request.urlopen(urllib.request.Request(f"{url}{path}", method=method), timeout=SOON) as answer:
        return json.loads(answer.read())


def answers(url: str, count: int) -> list[str]:
    """What so many callers at once are told, each with a seed of its own."""

    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=SOON) as client:
            calls = [
                client.completions.create(model="weather", prompt="a b c", max_tokens=8, temperature=1.0, seed=seed)
                for seed in range(count)
            ]
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    return asyncio.run(ask())


def test_replicas_share_the_work_and_one_is_drained_or_killed_without_a_lost_answer(
    server: tuple[Command, str],
) -> None:
    command, url = server
    expected = answers(url, 16)
    states = told(url, "/replicas")["replicas"]
    assert [one["state"] for one in states] == ["serving", "serving"] and {one["starts"] for one in states} == {1}

    assert told(url, "/replicas/0/drain", "POST")["state"] == "draining"
    assert answers(url, 16) == expected, "the tokens depend on the seed, not on the replica"
    assert told(url, "/replicas/0/admit", "POST")["state"] == "serving"

    engines = [
        child.pid
        for child in psutil.Process(command.process.pid).children(recursive=True)
        if os.getsid(child.pid) == child.pid and child.ppid() != command.process.pid
    ]
    assert len(engines) == 2
    os.killpg(engines[0], signal.SIGKILL)
    assert answers(url, 16) == expected
    end = time.monotonic() + SOON
    while sorted(one["starts"] for one in told(url, "/replicas")["replicas"]) != [1, 2]:
        assert time.monotonic() < end, told(url, "/replicas")
        time.sleep(0.1)


def test_a_replica_that_is_not_there_is_named(server: tuple[Command, str]) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        told(server[1], "/replicas/2/drain", "POST")
    assert refused.value.code == 404 and mentioned("0 to 1", refused.value.read().decode())
