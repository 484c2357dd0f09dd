"""Forks: a recorded episode is replayed token by token, continued from any turn, and refused where it does not repeat."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from support.agents import ScriptedEngine, call, play, sample, setting
from support.messages import raises

from hone.agents.forking import recorded_turns
from hone.agents.tools.calculator import Calculator
from hone.apps.lab.forks import Continuations, Fork, draw
from hone.data.types import Sample, Trajectory
from hone.errors import ConfigError, EpisodeError
from hone.generation.protocol import SamplingParams

SCHEMA = Calculator().schema
SAID = [call("calculator", expression="6*1"), call("calculator", expression="6*7"), "#### 42"]


def recorded(row: Sample) -> Trajectory:
    (trajectory,), _ = play(setting([Calculator()]), lambda name, turn: SAID[turn], [row])
    return trajectory


def continuations(row: Sample, turns, script, tools=None) -> tuple[Continuations, ScriptedEngine]:
    made = setting(tools or [Calculator()])
    engine = ScriptedEngine(made.tokenizer, script)
    sampling = SamplingParams(max_tokens=400, stop_token_ids=(made.tokenizer.eos_token_id,))
    return Continuations(engine, made, row, sampling, turns, seed=1), engine  # type: ignore[arg-type]


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_continuation_begins_with_the_recorded_tokens(turn: int) -> None:
    row = sample(uid="a", tools=[SCHEMA])
    original = recorded(row)
    turns = recorded_turns([original])
    assert [len(t.token_ids) for t in turns] == [
        len(list(run)) for sampled, run in itertools.groupby(original.response_mask) if sampled
    ]
    forks, engine = continuations(row, turns, lambda name, asked: SAID[turn + asked])
    for again in forks.play(turn, 3):
        assert again.response_ids == original.response_ids and again.response_mask == original.response_mask
        assert again.rollout_log_probs == original.rollout_log_probs
        assert again.episode is not None and [c.result for c in again.episode.calls] == ["6", "42"]
    assert len(engine.requests) == 3 * (3 - turn), "the engine is asked for the rest alone"
    first = [request for request in engine.requests if request.prompt_ids == turns[turn].prompt_ids]
    assert len(first) == 3 and len({request.seed for request in first}) == 3


def test_another_answer_from_the_middle() -> None:
    row = sample(uid="a", tools=[SCHEMA])
    turns = recorded_turns([recorded(row)])
    forks, _ = continuations(row, turns, lambda name, asked: "#### 41")
    (again,) = forks.play(1, 1)
    assert again.text.endswith("#### 41") and again.episode is not None and len(again.episode.calls) == 1


def test_the_last_result_can_be_changed() -> None:
    row = sample(uid="a", tools=[SCHEMA])
    original = recorded(row)
    turns = recorded_turns([original])
    forks, engine = continuations(row, turns, lambda name, asked: "#### 7")
    (again,) = forks.play(2, 1, content="the sandbox died")
    assert again.episode is not None
    shown = [message["content"] for message in again.episode.messages if message["role"] == "tool"]
    assert shown == ["6", "the sandbox died"]
    same = len(turns[1].prompt_ids) + len(turns[1].token_ids)
    assert engine.requests[0].prompt_ids[:same] == [*turns[1].prompt_ids, *turns[1].token_ids]
    assert engine.requests[0].prompt_ids != turns[2].prompt_ids
    with raises(ConfigError, "turn 0", where="--turn"):
        forks.play(0, 1, content="x")


class Unsteady(Calculator):
    """Another result at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.results = itertools.count(100)

    async def execute(self, state, arguments, **kwargs):
        return str(next(self.results))


def test_a_tool_that_does_not_repeat_is_named() -> None:
    row = sample(uid="a", tools=[SCHEMA])
    turns = recorded_turns([recorded(row)])
    forks, _ = continuations(row, turns, lambda name, asked: "#### 42", [Unsteady()])
    with raises(EpisodeError, "turn 1", where="turn 1"):
        forks.play(2, 1)
    assert len(forks.play(0, 1)) == 1


def test_success_and_its_interval(tmp_path: Path) -> None:
    fork = Fork(1, "text", [1.0, 0.0, 1.0, 1.0], [True, False, True, True])
    low, high = fork.interval
    assert fork.success == 0.75 and low == pytest.approx(0.3006, abs=1e-3) and high == pytest.approx(0.9544, abs=1e-3)
    assert Fork(0, "", [], []).interval == (0.0, 1.0)
    assert json.loads(json.dumps(fork.as_json()))["success"] == 0.75
    draw([(0, 0.25, (0.1, 0.5)), (1, fork.success, fork.interval)], "row", tmp_path / "f.png")
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")
