"""Tasksets of verifiers 0.4, in its own environment, played with exact tokens by the base URL of the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.environments import foreign_python
from support.messages import raises
from support.verifiers_world import TOKENIZER, World, ids

from hone.agents.tasks.verifiers import make
from hone.data.tasks.base import Problem
from hone.errors import ConfigError

FOREIGN = Path(__file__).parents[1] / "support" / "foreign"
pytestmark = pytest.mark.long("hone/agents/program")


@pytest.fixture(scope="module")
def python() -> str:
    return foreign_python("verifiers-v1", "verifiers==0.4.0", "uv")


@pytest.fixture(autouse=True)
def beside_the_tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOREIGN)


@pytest.fixture(scope="module")
def world(python: str) -> Iterator[World]:
    made = World(python)
    yield made
    made.context.close()


def problems(python: str, *options: str) -> list[Problem]:
    return list(make(["dataset=sums_v1", f"python={python}", *options]).problems(seed=1))


@pytest.fixture(scope="module")
def sums(python: str) -> list[Problem]:
    with contextlib.chdir(FOREIGN):
        return problems(python)


def test_a_game_of_a_taskset_is_played_with_exact_tokens(world: World, sums: list[Problem]) -> None:
    assert sorted(str(p.key) for p in sums) == [str(n) for n in range(8)]
    assert [p.key for p in sums] != sorted(str(p.key) for p in sums), "in the order of the seed"

    def second_try(request) -> list[int]:
        text = TOKENIZER.decode(request.prompt_ids)
        number = int(text.split("What is ")[1].split()[0])
        return ids(str(number + 3)) if "Try again" in text else ids("1000")

    for trajectory, problem in zip(world.play(second_try, sums[:3]), sums, strict=False):
        log = trajectory.episode
        assert log is not None and log.error is None and log.reward == 1.0, log
        assert log.facts == {"length": float(len(str(int(problem.key or 0) + 3))), "right": 1.0}
        said = [message["content"] for message in log.messages if message["role"] == "assistant"]
        assert said == ["1000", str(int(problem.key or 0) + 3)]
        sampled = [token for token, own in zip(trajectory.response_ids, trajectory.response_mask, strict=True) if own]
        assert sampled == [token for turn in said for token in ids(turn)]


def test_a_failure_of_the_environment_is_no_verdict(world: World, sums: list[Problem]) -> None:
    wrong, broken = (
        world.play(lambda request, word=word: ids(word), sums[:1])[0].episode for word in ("5000", "crash")
    )
    assert wrong is not None and (wrong.error, wrong.reward) == (None, 0.0)
    assert broken is not None and "the world came to its end" in str(broken.error)


def test_an_infinite_taskset_gives_as_many_rows_as_are_asked_for(python: str) -> None:
    endless = make(["dataset=sums_v1", f"python={python}", 'taskset={"count": -1}'])
    rows = [row for row, _ in zip(endless.problems(seed=1), range(30), strict=False)]
    assert [row.key for row in rows] == [str(n) for n in range(30)]
    with raises(ConfigError, "'nowhere'"):
        list(make(["dataset=nowhere", f"python={python}"]).problems(seed=1))
