"""One world for all end-to-end tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.launch import Ended, hone
from support.once import made_once
from support.patience import LONG
from support.world import World, make_world, world_in


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """See :class:`support.world.World`."""
    return world_in(made_once(tmp_path_factory, "world", make_world))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Ended]:
    """Run a `hone` command to its end in a process of its own."""
    counter = iter(range(1000))

    def start(*arguments: object, timeout: float = LONG) -> Ended:
        return hone(*arguments, log=tmp_path / f"command{next(counter)}.log", cwd=tmp_path, timeout=timeout)

    return start
