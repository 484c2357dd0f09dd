"""What is known about environments in another Python without their packages."""

import asyncio
import sys

import pytest
from support.messages import raises

from hone.agents.environments import hosted, make_environment
from hone.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("textarena", {"id": "TicTacToe-v0", "python": sys.executable}, "environment_python"),
        ("gem", {"id": "code:CodeContest"}, "sandbox"),
        ("textarena", {"id": "x", "seat": 1}, "seat=1"),
    ],
)
def test_options_that_are_refused(name: str, options: dict, words: str) -> None:
    with raises(ConfigError, words):
        make_environment(name, options)


def test_the_python_of_the_configuration_begins_the_game(tmp_path) -> None:
    async def begin(python: str) -> None:
        await make_environment("gem", {"id": "game:Sokoban-v0-easy"}, {"gem": python}).reset(1)

    with raises(ConfigError, str(tmp_path / "python"), where=hosted.KEY):
        asyncio.run(begin(str(tmp_path / "python")))
    with raises(ConfigError, "ModuleNotFoundError", where=hosted.WHERE):
        asyncio.run(begin(sys.executable))
    assert sys.executable in hosted._hosts
    hosted.close_hosts()
    assert not hosted._hosts
