"""Environments of TextArena and GEM, each in its own Python environment, played by the loops of a run."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from support.agents import play, sample, setting
from support.environments import foreign_python
from support.messages import raises

from hone.agents.base import EpisodeContext
from hone.agents.environments import hosted, make_environment
from hone.agents.messages import AssistantTurn
from hone.agents.tasks.environment import EnvironmentTask
from hone.data.episode_log import EpisodeEnd
from hone.data.types import Sample
from hone.errors import ConfigError, NoVerdict

pytestmark = pytest.mark.long("hone/agents/environments")
GUESS = {"id": "GuessTheNumber-v0", "kwargs": {"max_number": 8, "max_turns": 4}}
EASY = {"id": "game:GuessTheNumber-v0-easy"}


@pytest.fixture(scope="module")
def pythons() -> dict[str, str]:
    return {
        "textarena": foreign_python("textarena", "textarena==0.7.4"),
        "gem": foreign_python("gem", "gem-llm==0.1.0"),
    }


@pytest.fixture
def made(pythons: dict[str, str]) -> EpisodeContext:
    return setting(agent={"environment_python": pythons, "max_retries": 0, "on_error": "drop"})


def row(pythons: dict[str, str], name: str, seed: int, *, loop: str = "environment", **options) -> Sample:
    """The row that `hone data make` writes for this seed."""
    task = EnvironmentTask(name, {**options, "python": pythons[name]}, loop=loop)
    problem = asyncio.run(task.problem(seed))
    assert "python" not in str(problem.extra)
    return sample(problem.question, f"{name}{seed}", **problem.extra, agent_name=problem.agent_name)


def test_a_game_of_textarena_for_one_player(pythons, made) -> None:
    rows = [row(pythons, "textarena", seed, **GUESS) for seed in range(8)]
    played, _ = play(made, lambda name, turn: f"My guess is [{2 * turn + 2}].", rows, max_tokens=600)
    again, _ = play(made, lambda name, turn: f"My guess is [{2 * turn + 2}].", rows, max_tokens=600)
    logs = [t.episode for t in played]
    assert [log and log.summary() for log in logs] == [t.episode and t.episode.summary() for t in again]
    for log in logs:
        assert log is not None and (log.error, log.end) == (None, EpisodeEnd.DONE)
        assert log.turn_rewards[:-1] == [0.0] * (log.assistant_turns - 1)
        assert (log.turn_rewards[-1] == 1.0) == (log.facts["solved"] == 1.0 and log.assistant_turns <= 4)
        answers = [m["content"] for m in log.messages if m["role"] == "user"]
        assert all("My guess" not in text and ("higher" in text or "lower" in text) for text in answers)
    assert len({log.assistant_turns for log in logs if log}) > 1, "the seeds hide different numbers"


def test_both_seats_of_a_game_of_textarena(pythons, made) -> None:
    two = row(pythons, "textarena", 3, loop="self_play", id="TicTacToe-v0", players=2)

    def script(name: str, turn: int) -> str:
        return (["[3]", "[4]"] if "/" in name else ["[0]", "[1]", "[2]"])[turn]

    played, _ = play(made, script, [two], max_tokens=2000)
    log = played[0].episode
    assert log is not None and log.error is None and log.end is EpisodeEnd.DONE
    assert log.turn_roles == [
        *["textarena:TicTacToe-v0/1"] * 2,
        *["textarena:TicTacToe-v0/0"] * 3,
    ] and log.turn_rewards == [0.0, -1.0, 0.0, 0.0, 1.0]
    assert "[Player 1] [3]" in log.messages[1]["content"] and "[Player 0]" not in log.messages[1]["content"]
    with raises(ConfigError, "self_play", where="agent_name"):
        play(made, script, [row_of(two, "environment")])


def row_of(shown: Sample, loop: str) -> Sample:
    extra = {**shown.extra_info["environment"], "options": {**shown.extra_info["environment"]["options"], "seat": 1}}
    return sample(str((shown.messages or [])[0]["content"]), environment=extra, agent_name=loop)


def test_an_environment_of_gem(pythons, made) -> None:
    rows = [row(pythons, "gem", seed, **EASY) for seed in range(8)]
    played, _ = play(made, lambda name, turn: rf"\boxed{{{2 * turn + 2}}}", rows, max_tokens=1000)
    for trajectory in played:
        log = trajectory.episode
        assert log is not None and (log.error, log.end) == (None, EpisodeEnd.DONE)
        assert log.facts["steps"] == log.assistant_turns and all(0 <= reward <= 1 for reward in log.turn_rewards)
        assert (log.turn_rewards[-1] == 1.0) == (log.facts["solved"] == 1.0)
        assert all("Enter your next guess." in m["content"] for m in log.messages if m["role"] == "user")
    rewards = {t.episode.turn_rewards[-1] for t in played if t.episode}
    assert 1.0 in rewards and len(rewards) > 1


def test_games_do_not_share_their_random_numbers(pythons) -> None:
    async def draws(interleaved: bool) -> list[str]:
        worlds = [make_environment("gem", {"id": "game:GuessTheNumber-v0-random"}, pythons) for _ in range(2)]
        shown = [(await worlds[0].reset(7))[0]["content"]]
        if interleaved:
            await worlds[1].reset(8)
        shown.append((await worlds[0].step(AssistantTurn(r"\boxed{5}"))).messages[0]["content"])
        for world in worlds:
            await world.close()
        return shown

    assert asyncio.run(draws(False)) == asyncio.run(draws(True))


def test_mistakes_are_named_and_a_lost_process_is_no_verdict(pythons, made) -> None:
    async def begin(name: str, options: dict) -> None:
        await make_environment(name, options, pythons).reset(1)

    for name, options, words in (
        ("textarena", {"id": "GessTheNumber-v0"}, "GessTheNumber-v0"),
        ("textarena", {"id": "GuessTheNumber-v0", "players": 2}, "AssertionError"),
        ("gem", {"id": "game:Guess"}, "game:Guess"),
    ):
        with raises(ConfigError, words, where="extra_info.environment.options"):
            asyncio.run(begin(name, options))
    shown = row(pythons, "textarena", 1, **GUESS)

    def script(name: str, turn: int) -> str:
        os.kill(hosted._hosts[pythons["textarena"]].process.pid, signal.SIGKILL)
        return "[1]"

    (trajectory,), _ = play(made, script, [shown])
    log = trajectory.episode
    assert log is not None and log.no_verdict and "EnvironmentFailed" in str(log.error)
    assert issubclass(hosted.EnvironmentFailed, NoVerdict)
    (trajectory,), _ = play(made, lambda name, turn: "[1]", [row(pythons, "textarena", 1, **GUESS)])
    assert trajectory.episode is not None and trajectory.episode.error is None
