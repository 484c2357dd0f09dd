"""Functions and classes given to `hone.train` and `hone.evaluate`, callbacks, and what a user sees of a mistake."""

from __future__ import annotations

import os
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from support.forked_python import Forks
from support.patience import LONG
from support.python_objects import AlwaysCalls, Echo, double, tool_answered
from support.small_tools import tools_model
from support.world import World
from torch import Tensor

import hone
from hone.errors import HoneError

pytestmark = [pytest.mark.slow, pytest.mark.application("hone/api", "hone/user_objects.py", "hone/user_code.py")]
SHAPE = {"max_prompt_length": 700, "max_response_length": 64, "train_batch_size": 4, "n": 2, "lr": 1e-3}
EPISODES = {"max_assistant_turns": 4, "max_tokens_per_turn": 8, "max_tool_response_length": 16}
ROWS = [{"prompt": [{"role": "user", "content": f"double {number}"}], "data_source": "doubles"} for number in range(8)]


@pytest.fixture(scope="module")
def model(world: World, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tools_model(world, tmp_path_factory.mktemp("tools")))


def test_tools_and_a_loop_from_python(model: str, tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    calls: list[int] = []

    def count(number: int) -> str:
        """Count.

        Args:
            number: counted.
        """
        calls.append(number)
        return str(number)

    def second_step(sample: dict[str, Any]) -> bool:
        seen.append(sample)
        return sample["step"] == 2

    class Counts(AlwaysCalls):
        async def play(self, episode: Any) -> None:
            await super().play(episode)
            assert self.context.toolbox.schemas()[1]["function"]["name"] == "count"
            await self.context.toolbox["count"].execute(None, {"number": 7})

    run = hone.train(
        model, ROWS, reward=tool_answered, tools=[double, count, "calculator"], agent_loop=Counts, steps=5,
        out=tmp_path / "run", on_sample=second_step, **SHAPE, **EPISODES,
    )  # fmt: skip
    assert [sample["step"] for sample in seen] == [1] * 8 + [2] * 8 and len(run.metrics) == 2
    assert run.status == "finished" and calls == [7] * 16
    assert {sample["terms"]["answered"] for sample in seen} == {1.0}
    for sample in seen:
        assert sample["prompt"].startswith("double ") and sample["score"] == pytest.approx(
            1 + 0.001 * len(sample["text"])
        )
        assert sample["stop_reason"] in ("stop", "length") and sample["episode"]["end"]
    again = hone.evaluate(
        run, ROWS, reward=tool_answered, max_prompt_length=700, max_response_length=64, tools=[double, count]
    )
    assert again["num_turns/mean"] == pytest.approx(run.metrics[0]["num_turns/mean"])


def test_an_environment_from_python(model: str, tmp_path: Path) -> None:
    limits = {"max_prompt_length": 700, "max_response_length": 64}
    run = hone.train(
        model, range(4), environment=Echo, val_dataset=[{"seed": 9, "options": {"turns": 3}}], steps=1, test_freq=1,
        out=tmp_path / "run", **SHAPE, **EPISODES,
    )  # fmt: skip
    assert 2 <= run.metrics[-1]["critic/rewards/mean"] < 2.2
    assert 3 <= run.metrics[-1]["val-core/environment/Echo/reward/mean@1"] < 3.3
    found = hone.evaluate(run, [{"seed": 9, "options": {"turns": 1}}], environment=Echo, **limits)
    assert 1 <= found["val-core/environment/Echo/reward/mean@1"] < 1.1


def halves(token_level_rewards: Tensor, response_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Half of the score for every token."""
    scores = token_level_rewards.sum(-1, keepdim=True).expand_as(response_mask) / 2 * response_mask
    return scores, scores


def test_a_key_that_takes_an_import_path_takes_a_function(world: World, tmp_path: Path) -> None:
    run = hone.train(
        str(world.model), ROWS, reward=lambda solution_str, **unused: 1.0, adv_estimator=halves, steps=1,
        out=tmp_path / "run", **{**SHAPE, "max_response_length": 8},
    )  # fmt: skip
    assert run.metrics[0]["critic/advantages/mean"] == pytest.approx(0.5)


def without_hints(number):  # noqa: ANN001, ANN201 - the mistake of this test
    return number


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"tools": [without_hints]}, "without_hints"),
        ({"tools": [Echo]}, "Echo"),
        ({"tools": [double], "environment": Echo}, "environment"),
        ({"environment": Echo}, "seeds"),
        ({"agent_loop": Echo}, "Echo"),
        ({"interaction": Echo, "agent_loop": "interaction"}, "Echo"),
    ],
)
def test_a_wrong_object_is_one_message(model: str, tmp_path: Path, given: dict[str, Any], word: str) -> None:
    with pytest.raises(HoneError) as caught:
        hone.train(model, ROWS, reward=tool_answered, steps=1, out=tmp_path / "run", **given, **SHAPE, **EPISODES)
    assert word in caught.value.what and not (tmp_path / "run").exists()


def test_two_objects_of_one_name(model: str, tmp_path: Path) -> None:
    def reward(solution_str: str, **unused: object) -> float:
        return 0.0

    reward.__name__ = "double"
    with pytest.raises(HoneError, match="double"):
        hone.train(model, ROWS, reward=reward, tools=[double], out=tmp_path / "run", **SHAPE, **EPISODES)


def test_an_object_that_cannot_be_sent_stops_before_a_cluster_starts(model: str, tmp_path: Path) -> None:
    lock = Lock()

    def locked(number: int) -> int:
        """Count.

        Args:
            number: counted.
        """
        with lock:
            return number

    with pytest.raises(HoneError) as caught:
        hone.train(
            model, ROWS, reward=tool_answered, tools=[locked], agent_loop=AlwaysCalls, steps=1, out=tmp_path / "run",
            runtime="ray", **SHAPE, **EPISODES,
        )  # fmt: skip
    assert caught.value.where == "function:locked"


@pytest.mark.parametrize("callback", ["on_step", "on_sample"])
def test_an_error_of_a_callback_ends_the_run_with_its_trace(world: World, tmp_path: Path, callback: str) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    def broken(*arguments: object) -> None:
        raise ZeroDivisionError("of the callback")

    rows = [{"prompt": row["prompt"]} for row in ROWS]
    shape = {**SHAPE, "max_response_length": 8}
    given: dict[str, Callable[..., None]] = {callback: broken}
    with pytest.raises(ZeroDivisionError) as caught:
        hone.train(str(world.model), rows, reward=lambda solution_str, **_: len(solution_str), out=tmp_path / "run",
                   steps=2, **shape, **given)  # fmt: skip
    assert traceback.extract_tb(caught.tb)[-1].name == "broken"
    assert hone.Run(tmp_path / "run").status == "failed"
    assert not {child.pid for child in psutil.Process().children(recursive=True)} - before


def test_a_mistake_has_a_short_traceback(world: World, forks: Forks, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import hone\nhone.train({str(world.model)!r}, {str(world.train)!r}, no_such_key=1)\n")

    def frames(**environment: str) -> int:
        ended = subprocess.run(
            [forks.bin / "python", script],
            capture_output=True,
            text=True,
            timeout=LONG,
            env={**os.environ, **environment},
        )
        assert ended.returncode == 1 and "R09" in ended.stderr
        return ended.stderr[ended.stderr.index(f'  File "{script}') :].count('  File "')  # without those of the fork

    assert frames() == 2
    assert frames(HONE_DEBUG="1") > 4


@pytest.mark.long("hone/api", "hone/user_objects.py", "hone/progress.py")
def test_a_notebook_shows_one_line_and_a_curve(model: str, tmp_path: Path) -> None:
    cells = [
        "import hone\nfrom hone.agents.environments import Environment, Step",
        "class Count(Environment):\n"
        "    async def reset(self, seed):\n        return [{'role': 'user', 'content': f'Say {seed}.'}]\n"
        "    async def step(self, turn):\n        return Step(reward=float(len(turn.content)), done=True)",
        f"run = hone.train({model!r}, range(8), environment=Count, steps=3, out={str(tmp_path / 'run')!r}, "
        "max_prompt_length=200, max_response_length=8, train_batch_size=4, n=2, max_assistant_turns=1, lr=1e-3)",
        "print(run.status, len(run.metrics))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=int(LONG), resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.cells[-1]["outputs"][0]["text"].split() == ["finished", "3"]
    shown = [output for output in notebook.cells[2]["outputs"] if "text/html" in output.get("data", {})]
    assert len(shown) == 1 and shown[0]["data"]["text/html"].count("<polyline") == 1
    assert "3/3" in shown[0]["data"]["text/plain"]
