"""Episodes on a real OpenEnv server, which runs in a virtual environment of its own."""

from __future__ import annotations

import asyncio
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import call, play, setting
from support.environments import foreign_python
from support.messages import raises
from support.services import free_port
from support.templates import tokenizer

from hone.agents.environments import make_environment
from hone.agents.environments.openenv import OpenEnv, action_interface
from hone.agents.messages import AssistantTurn
from hone.agents.tasks.environment import EnvironmentTask
from hone.agents.tool_agent import tools_of
from hone.data.chat import render_prompt
from hone.data.episode_log import EpisodeEnd
from hone.data.types import Sample
from hone.errors import ConfigError

SERVER = Path(__file__).parents[1] / "support" / "foreign" / "openenv_server.py"
pytestmark = pytest.mark.long("hone/agents/environments")


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, str]]:
    """Addresses of the three servers, by kind."""
    python = foreign_python("openenv", "openenv==0.10.0")
    urls, processes = {}, []
    for kind in ("guess", "moves", "tools"):
        port = free_port()
        processes.append(subprocess.Popen([python, str(SERVER), kind, str(port)], stderr=subprocess.PIPE))
        urls[kind] = f"http://127.0.0.1:{port}"
    try:
        for (kind, url), process in zip(urls.items(), processes, strict=True):
            for _ in range(600):
                if process.poll() is not None:
                    raise RuntimeError(f"the server {kind} ended: {(process.stderr or SERVER.open('rb')).read()!r}")
                try:
                    urllib.request.urlopen(f"{url}/health", timeout=1)
                    break
                except OSError:
                    time.sleep(0.1)
        yield urls
    finally:
        for process in processes:
            process.kill()
            process.wait()


def row(url: str, seed: int, uid: str, **options) -> Sample:
    """The row that `hone data make environment:openenv` writes for this seed."""
    problem = asyncio.run(EnvironmentTask("openenv", {"url": url, **options}).problem(seed))
    assert problem.prompt is not None
    shown = Sample(uid, [], problem.prompt, "environment/openenv", "", problem.extra, "environment")
    tools = list(tools_of(setting())(shown))
    shown.prompt_ids = render_prompt(tokenizer("qwen2_5"), problem.prompt, {"tools": tools} if tools else None)
    return shown


def test_a_turn_is_an_action_with_one_text(servers) -> None:
    rows = [row(servers["guess"], seed, f"row{seed}") for seed in range(5)]
    played, _ = play(setting(), lambda name, turn: str(turn + 1), rows)
    for trajectory in played:
        log = trajectory.episode
        assert log is not None and log.error is None and log.end is EpisodeEnd.DONE
        said = [message["content"] for message in log.messages if message["role"] == "user"]
        assert said == ["wrong"] * (log.assistant_turns - 1)
        assert log.turn_rewards == pytest.approx([-0.1] * (log.assistant_turns - 1) + [1.0])
        assert log.facts == {"solved": 1.0, "steps": float(log.assistant_turns), "invalid_action": 0.0}
    assert len({t.episode.assistant_turns for t in played if t.episode}) > 1, "the seeds hide different numbers"
    assert {t.sample.messages[0]["content"] for t in played} == {"a number from 1 to 3"}


def test_any_other_action_is_a_function(servers) -> None:
    shown = row(servers["moves"], 2, "line", prompt="Go to the goal.")
    assert shown.messages == [{"role": "user", "content": 'Go to the goal.\n{"place": 0, "goal": 3}'}]
    script = [call("act", way="up", steps=1), call("act", way="right", steps=1) + call("act", way="right", steps=2)]
    (trajectory,), engine = play(setting(), lambda name, turn: script[turn], [shown])
    log = trajectory.episode
    assert log is not None and log.end is EpisodeEnd.DONE and log.turn_rewards == [0.0, 1.0]
    assert log.facts["solved"] == 1.0 and log.facts["invalid_action"] == 0.0
    answer = log.messages[1]
    assert answer["role"] == "tool" and "cannot be taken" in answer["content"] and "way" in answer["content"]
    (act,) = make_environment("openenv", {"url": servers["moves"]}).tools
    assert act["function"]["description"] == "Move on a line."
    assert set(act["function"]["parameters"]["properties"]) == {"way", "steps"}
    assert '"name": "act"' in tokenizer("qwen2_5").decode(engine.requests[0].prompt_ids)


def test_mcp_tools_of_a_server_are_the_policys(servers) -> None:
    shown = row(servers["tools"], 1, "sum", prompt="What is 2 + 3?")
    script = [call("add", a=2, b=3), call("sub", a=2), "5"]
    (trajectory,), _ = play(setting(), lambda name, turn: script[turn], [shown])
    log = trajectory.episode
    assert log is not None and log.end is EpisodeEnd.DONE and log.assistant_turns == 3
    told = [message["content"] for message in log.messages if message["role"] == "tool"]
    assert told == ["5", "there is no function sub; there are: add"]


def test_an_environment_error_fails_its_episode(servers) -> None:
    made = setting(agent={"on_error": "drop", "max_retries": 0})
    (trajectory,), _ = play(made, lambda name, turn: "crash", [row(servers["guess"], 1, "row")])
    assert trajectory.episode is not None and "the world came to its end" in str(trajectory.episode.error)


def test_a_full_server_and_invalid_options(servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.agents.environments.openenv.SESSION_WAIT_SECONDS", 0.3)

    async def many() -> None:
        worlds = [OpenEnv(url=servers["guess"]) for _ in range(9)]
        for world in worlds[:8]:
            await world.reset(1)
        with raises(ConfigError, servers["guess"], "CAPACITY_REACHED", "agent.max_concurrent_episodes=1"):
            await worlds[8].reset(1)
        await worlds[0].close()
        assert (await worlds[8].reset(1))[0]["content"] == "a number from 1 to 3"
        assert (await worlds[8].step(AssistantTurn("9"))).reward == pytest.approx(-0.1)
        for world in worlds:
            await world.close()
            await world.close()

    asyncio.run(many())
    for options, words in (
        ({"url": servers["guess"], "text": "mesage"}, "mesage"),
        ({"url": "http://127.0.0.1:9"}, "http://127.0.0.1:9"),
        ({"url": servers["guess"], "typo": 1}, "typo"),
    ):
        with raises(ConfigError, words):
            make_environment("openenv", options)
    for options, words in (
        ({"url": servers["guess"], "shown": "text"}, "text"),
        ({"url": servers["tools"]}, "prompt"),
    ):
        with raises(ConfigError, words):
            asyncio.run(make_environment("openenv", options).reset(1))
    assert action_interface(servers["guess"], None).text == "message"
