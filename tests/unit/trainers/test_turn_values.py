"""Turns are chosen by what is known before them, and continued from their exact tokens."""

from __future__ import annotations

import asyncio
import dataclasses

from support.agents import ScriptedEngine, call, play, sample, setting

from hone.agents.forking import fork_points, fork_rewards, play_forks, values_by_row
from hone.agents.player import Player
from hone.agents.tools.calculator import Calculator
from hone.config.algorithm import ForksConfig
from hone.data.batch import to_batch
from hone.data.ragged import Ragged
from hone.generation.protocol import SamplingParams
from hone.rewards.score import Score


def script(name: str, turn: int) -> str:
    return call("calculator", expression=f"{turn}+1") if turn < 2 else f"#### {turn}"


def played(count: int = 2):
    made = setting([Calculator()])
    tools = [made.toolbox["calculator"].schema]
    trajectories, _ = play(made, script, [sample(tools=tools)], n=count, max_tokens=600)
    return made, trajectories, to_batch(trajectories)


def with_entropies(batch, trajectories, of_turns):
    """Columns with the entropy of each turn's first token; that of all other tokens is high."""
    rows = []
    for trajectory in trajectories:
        turns, before, row = iter(of_turns), 0, []
        for sampled in trajectory.response_mask:
            row.append(next(turns) if sampled and not before else 9.0)
            before = sampled
        rows.append(row)
    return batch.with_columns(entropy=Ragged.from_rows(rows))


def test_turns_with_a_choice_are_forked():
    _, trajectories, batch = played()
    batch = with_entropies(batch, trajectories, (2.0, 0.6, 0.1))
    points = fork_points(batch, ForksConfig(min_entropy=0.5), (1,))
    assert [(point.uid, point.turn, point.rows) for point in points] == [("row^0.1", 1, [0]), ("row^1.1", 1, [1])]
    assert fork_points(batch, ForksConfig(min_entropy=0.7), (1,)) == []
    low = ForksConfig(min_entropy=0.0)
    assert len(fork_points(batch, low, (1,))) == 4, "the first turn has the group's baseline"
    some = [{p.uid for p in fork_points(batch, dataclasses.replace(low, max_turns=2), (seed,))} for seed in range(20)]
    assert all(len(chosen) == 2 for chosen in some) and len({frozenset(chosen) for chosen in some}) > 3


def test_continuations_repeat_the_turns_before():
    made, trajectories, batch = played(1)
    points = fork_points(with_entropies(batch, trajectories, (0.0, 1.0, 1.0)), ForksConfig(), (1,))
    assert [point.turn for point in points] == [1, 2]
    engine = ScriptedEngine(made.tokenizer, lambda name, turn: "#### forked")
    sampling = SamplingParams(max_tokens=600, stop_token_ids=(made.tokenizer.eos_token_id,))
    forks = asyncio.run(play_forks(engine, Player(engine, made), points, sampling, 3, (5,)))  # type: ignore[arg-type]
    assert forks.uids == ["row^0.1"] * 3 + ["row^0.2"] * 3
    recorded = trajectories[0]
    for row, continued in enumerate(forks.objects("trajectory")):
        turns = 1 if row < 3 else 2
        assert continued.episode.assistant_turns == turns + 1 and continued.episode.error is None
        shared = len(continued.response_ids) - len(made.tokenizer.encode("#### forked")) - 1
        assert continued.response_ids[:shared] == recorded.response_ids[:shared]
    assert len({request.seed for request in engine.requests}) == 6
    scores = [Score(float(n), {}) for n in range(5)] + [Score(0.0, {}, error="lost")]
    rewards = fork_rewards(forks.with_columns(score=scores))
    assert rewards == {"row^0.1": [0.0, 1.0, 2.0], "row^0.2": [3.0, 4.0]}
    assert values_by_row(1, points, rewards) == [{1: 1.0, 2: 3.5}]
    assert values_by_row(1, points, {"row^0.1": [], "row^0.2": [1.0]}) == [{2: 1.0}]
