"""Environments of the real library verifiers, in a virtual environment of its own, played with exact tokens."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import call
from support.environments import foreign_python
from support.messages import raises
from support.verifiers_world import TOKENIZER, World, ids

from hone.agents.program.bridge import verifiers_bridge
from hone.agents.program.process import ProgramFailed
from hone.agents.tasks.verifiers import make
from hone.data.episode_log import EpisodeEnd
from hone.data.tasks.base import Problem
from hone.errors import ConfigError

FOREIGN = Path(__file__).parents[1] / "support" / "foreign"
pytestmark = pytest.mark.long("hone/agents/environments")


@pytest.fixture(scope="module")
def python() -> str:
    return foreign_python("verifiers", "verifiers==0.3.1")


@pytest.fixture(autouse=True)
def beside_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOREIGN)


@pytest.fixture(scope="module")
def world(python: str) -> Iterator[World]:
    made = World(python)
    yield made
    made.context.close()


@pytest.fixture(scope="module")
def games(python: str) -> list[Problem]:
    with contextlib.chdir(FOREIGN):
        return list(make(["dataset=hone_numbers", f"python={python}", "count=8"]).problems(seed=1))


def guess(request) -> list[int]:
    """Halve what is left, from what was heard."""
    shown = (
        TOKENIZER.decode(request.prompt_ids).split("Find number ")[1].replace("<", " ").replace(".", " ").split()[1:]
    )
    said, heard = [word for word in shown if word.isdigit()], [word for word in shown if word in ("higher", "lower")]
    low, high = 0, 7
    for number, answer in zip(said, heard, strict=True):
        low, high = (int(number) + 1, high) if answer == "higher" else (low, int(number) - 1)
    return ids(str((low + high) // 2))


def test_a_game_of_verifiers_is_played_with_exact_tokens(world: World, games: list[Problem]) -> None:
    assert len(games) == 8 and len({p.question for p in games}) == 8
    assert [p.key for p in games] != sorted(str(p.key) for p in games), "in the order of the seed"
    played = world.play(guess, games[:4])
    for trajectory, problem in zip(played, games, strict=False):
        log = trajectory.episode
        assert log is not None and log.error is None and log.reward == 1.0, log
        assert log.facts["found"] == 1.0 and log.facts["turns"] == float(log.assistant_turns)
        said = [message["content"] for message in log.messages if message["role"] == "assistant"]
        assert said[-1] == problem.ground_truth and len(said) == log.assistant_turns
        sampled = [token for token, own in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if own]
        assert sampled == [token for turn in said for token in ids(turn)]
    assert {request.sampling.temperature for request in world.engine.asked} == {0.7}, "the run's, not the environment's"


def test_tools_of_verifiers_are_called(world: World) -> None:
    prompt = [{"role": "user", "content": "What is 4 + 3?"}]
    row = json.dumps({"prompt": prompt, "answer": "7", "example_id": 0})
    spec = {"environment": "hone_numbers", "arguments": '{"kind": "sum"}', "row": row}
    problem = Problem("", "7", None, {"verifiers": spec}, prompt=prompt, key="sum")

    def adder(request) -> list[int]:
        done = "<tool_response>" in TOKENIZER.decode(request.prompt_ids)
        return ids("7") if done else ids(call("add", a=4, b=3))

    (trajectory,) = world.play(adder, [problem])
    log = trajectory.episode
    assert log is not None and log.error is None and (log.reward, log.end) == (1.0, EpisodeEnd.ANSWER)
    assert [message["role"] for message in log.messages] == ["assistant", "tool", "assistant"]
    assert log.facts["add_calls"] == 1.0


def test_limits_end_an_episode_and_errors_are_logged(world: World, games: list[Problem]) -> None:
    (short,) = world.play(lambda request: ids("9"), games[:1], tokens=12)
    assert short.episode is not None and (short.episode.error, short.episode.end) == (None, EpisodeEnd.TOKENS)
    (broken,) = world.play(lambda request: ids("crash"), games[:1])
    assert broken.episode is not None and "the world came to its end" in str(broken.episode.error)


def test_a_program_that_ends_or_was_never_there(python: str) -> None:
    with raises(ConfigError, "/nowhere/python", "python=/path/to/venv/bin/python"):
        next(make(["dataset=hone_numbers", "python=/nowhere/python"]).problems(seed=1))
    bridge = verifiers_bridge(python, "python")
    with raises(ProgramFailed, "nowhere"):
        bridge.ask("rows", environment="nowhere", arguments={}, count=1, seed=1).result(250)
    pending = bridge.ask("rows", environment="hone_numbers", arguments={}, count=1, seed=1)
    os.killpg(bridge.process.pid, 9)
    with raises(ProgramFailed, "-9"):
        pending.result(60)
    with raises(ProgramFailed, "-9"):
        bridge.ask("rows", environment="hone_numbers", arguments={}, count=1, seed=1).result(60)
    bridge.close()
    with raises(ConfigError, "nowhere", where="verifiers/nowhere"):
        next(make(["dataset=nowhere", "python=/bin/false"]).problems(seed=1))
