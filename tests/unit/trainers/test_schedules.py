"""Random schedules on virtual time: nothing deadlocks, no bound is exceeded, no prompt is lost or trained twice."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.schedule.clock import Crash, Deadlock, run
from support.schedule.engine import Speed
from support.schedule.simulation import Loss, Schedule, Simulation, Step
from support.schedule.workload import Plan, Turn, Workload

from hone.data.batch import is_broken
from hone.data.prompts import EpochSampler
from hone.errors import ConfigError, EpisodeError

PLENTY = 10_000


def workload(longest: int, turns: int, tool_seconds: float, fails: float, useful: float) -> Workload:
    """Return episodes whose last tenth is five times as long, as in practice."""

    def plan(draw: random.Random) -> Plan:
        def turn() -> Turn:
            tokens = draw.randint(1, longest) * (5 if draw.random() < 0.1 else 1)
            return Turn(tokens, draw.random() * tool_seconds, draw.randint(0, 3))

        played = tuple(turn() for _ in range(draw.randint(1, turns)))
        return Plan(played, fails=draw.random() < fails)

    return Workload(
        plan,
        score_seconds=lambda draw: draw.choice([0.0, draw.random() * 3]),
        useful=lambda draw: draw.random() < useful,
        prompt_tokens=3,
    )


@st.composite
def schedules(draw: st.DrawFn, **fixed: Any) -> Schedule:
    """Draw a small schedule; half of them have no failures, filters or tools."""
    batch, staleness = draw(st.integers(2, 4)), draw(st.integers(0, 3))
    replicas, plain = draw(st.integers(1, 3)), draw(st.booleans())
    lost = not plain and draw(st.booleans())
    losses = tuple(Loss(index, draw(st.floats(0, 60)), draw(st.floats(0.1, 30))) for index in range(replicas) if lost)
    fails = 0.0 if plain else draw(st.sampled_from([0.0, 0.1]))
    useful = 1.0 if plain else draw(st.sampled_from([1.0, 0.6]))
    episodes = workload(
        draw(st.sampled_from([1, 8, 40])),
        1 if plain else draw(st.integers(1, 3)),
        0.0 if plain else draw(st.sampled_from([0.0, 1.0, 30.0])),
        fails,
        useful,
    )
    update = draw(st.sampled_from([0.0, 0.5, 5.0]))
    values: dict[str, Any] = {
        "steps": draw(st.integers(2, 5)),
        "groups_per_batch": batch,
        "n": 2 if useful < 1 else draw(st.integers(1, 2)),
        "rows": draw(st.integers(batch, 30)),
        "max_staleness": staleness,
        "partial_rollouts": staleness > 0 and draw(st.booleans()),
        "ready_first": draw(st.booleans()),
        "replicas": replicas,
        "update_seconds": lambda tokens: update + 0.001 * tokens,
        "sync_seconds": draw(st.sampled_from([0.0, 0.3])),
        "max_gen_batches": PLENTY if useful < 1 else None,
        "max_no_verdict_rate": PLENTY if fails else None,
        "losses": losses,
        "seed": draw(st.integers(0, 10_000)),
    }
    speed = Speed(0.05, 0.01, draw(st.sampled_from([0.0, 0.002])), draw(st.sampled_from([2, 1024])))
    return Schedule(episodes, speed, **(values | fixed))


def simulated(schedule: Schedule, *, crash_at: float = math.inf, state: dict[str, Any] | None = None) -> Simulation:
    made: list[Simulation] = []

    async def whole() -> None:
        made.append(Simulation(schedule, state))
        await made[0].run()

    try:
        run(whole(), until=crash_at)
    except Crash:
        assert crash_at < math.inf
    return made[0]


def trace(simulation: Simulation) -> list[Any]:
    """Return times, groups and tokens of every step; trajectories also have seconds of this machine."""
    return [
        (
            dataclasses.replace(step, trajectories=()),
            [(one.uid, one.index, one.response_ids, one.token_versions) for one in step.trajectories],
        )
        for step in simulation.steps
    ]


def check(simulation: Simulation, *, first_step: int = 0) -> None:
    schedule, buffer = simulation.schedule, simulation.buffer
    assert [step.version for step in simulation.steps] == list(range(first_step, schedule.steps))
    for step in simulation.steps:
        times = [step.begun, step.batch_complete, step.updated, step.drained, step.published]
        assert times == sorted(times)
        assert len(step.groups) == schedule.groups_per_batch
        admitted = dict(step.groups)
        assert all(0 <= step.version - version <= schedule.max_staleness for version in admitted.values())
        episodes = [(one.uid, one.index) for one in step.trajectories]
        assert sorted(episodes) == sorted((uid, index) for uid in admitted for index in range(schedule.n))
        for one in step.trajectories:
            assert not is_broken(one)
            sampled = [place for place, mask in enumerate(one.response_mask) if mask]
            versions = [one.token_versions[place] for place in sampled]
            assert versions == [one.response_ids[place] for place in sampled], "a token has the version that sampled it"
            assert versions == sorted(versions)
            oldest = admitted[one.uid]
            newest = step.version if schedule.partial_rollouts else oldest
            assert all(oldest <= version <= newest for version in versions)
    check_fates(simulation)
    counts = simulation.rollouter.ledger.counts()
    assert counts["drawn"] == sum(counts.values()) - counts["drawn"]
    assert counts["trained"] == schedule.steps * schedule.groups_per_batch
    assert counts["in_flight"] + counts["finished"] == len(buffer.open_groups())
    taken = (schedule.max_staleness + 1) * schedule.groups_per_batch - len(buffer.open_groups())
    assert buffer.free_slots == taken and (schedule.max_staleness == 0 or taken == 0)


def uids_of(steps: list[Step]) -> list[list[str]]:
    return [[uid for uid, _ in step.groups] for step in steps]


def row_of(uid: str) -> int:
    return int(uid.partition("~")[0])


def drawn_rows(schedule: Schedule, count: int) -> list[int]:
    """Return the first rows in the order of the data."""
    plain = EpochSampler(schedule.rows, schedule.groups_per_batch, shuffle=True, seed=schedule.seed)
    rows: list[int] = []
    while len(rows) < count:
        rows += plain.next_batch()
    return rows[:count]


def check_fates(simulation: Simulation) -> None:
    """Every drawn prompt is admitted once, in the order of the data, and is then trained or evicted, or is in the buffer.

    A group that dynamic sampling has judged useless is not trained.
    """
    schedule, buffer = simulation.schedule, simulation.buffer
    admitted = [uid for event, uid in buffer.events if event == "admitted"]
    assert [row_of(uid) for uid in admitted] == drawn_rows(schedule, len(admitted))
    inside: list[str] = []
    useless: set[str] = set()
    for event, uid in buffer.events:
        if event == "useless":
            useless.add(uid)
            continue
        if event == "admitted":
            assert uid not in inside
            inside.append(uid)
            continue
        assert event == "evicted" or uid not in useless, "a group without learning signal is replaced"
        useless.discard(uid)
        if event == "trained" and not schedule.ready_first:
            assert inside[0] == uid
        inside.remove(uid)
    assert inside == [uid for uid, _, _ in buffer.open_groups()]


@given(schedules())
@examples(800)
def test_schedules_end_within_their_bounds(schedule):
    check(simulated(schedule))


@given(schedules())
@examples(200)
def test_two_runs_of_a_schedule_are_equal(schedule):
    one, other = simulated(schedule), simulated(schedule)
    assert trace(one) == trace(other)
    assert one.buffer.events == other.buffer.events


@given(schedules(), st.floats(0, 1))
@examples(300)
def test_a_resumed_run_loses_no_prompt_and_trains_none_twice(schedule, share):
    whole = simulated(schedule)
    crashed = simulated(schedule, crash_at=share * whole.steps[-1].published)
    resumed = simulated(schedule, state=crashed.saved)
    check(resumed, first_step=crashed.saved["step"])
    assert trace(crashed)[: crashed.saved["step"]] == trace(whole)[: crashed.saved["step"]]
    if not schedule.ready_first and schedule.max_no_verdict_rate is None and schedule.max_gen_batches is None:
        assert uids_of(resumed.steps) == uids_of(whole.steps[crashed.saved["step"] :])


@given(schedules(max_no_verdict_rate=None), st.sampled_from([0.02, 0.5]))
@examples(100)
def test_a_failed_episode_ends_the_run_and_nothing_hangs(schedule, fails):
    failing = workload(8, 2, 1.0, fails, 1.0)
    try:
        check(simulated(dataclasses.replace(schedule, workload=failing, max_gen_batches=None)))
    except EpisodeError as error:
        assert "fails by its plan" in str(error)


def test_a_deadlock_is_reported_with_the_waiting_tasks():
    async def waits_for_ever():
        await asyncio.sleep(5)
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="5 s"):
        run(waits_for_ever())


def test_an_engine_that_never_returns_is_a_deadlock():
    schedule = Schedule(workload(8, 1, 0.0, 0.0, 1.0), Speed(0.1), losses=(Loss(0, 0.5, float("inf")),))
    with pytest.raises(Deadlock, match=r"learner waits in .*EngineClient\._serve"):
        simulated(schedule)


@pytest.mark.parametrize("staleness", [0, 3])
@pytest.mark.parametrize("budget", [{"max_gen_batches": 3}, {"max_no_verdict_rate": 0.5}])
def test_limits_on_replaced_groups_hold_for_a_step_that_finishes_several_batches(staleness, budget):
    replaced = workload(8, 1, 0.0, *((0.0, 0.5) if "max_gen_batches" in budget else (0.1, 1.0)))
    schedule = Schedule(replaced, Speed(0.1), groups_per_batch=40, steps=2, max_staleness=staleness, **budget)
    check(simulated(schedule))


@pytest.mark.parametrize("staleness", [0, 3])
def test_hopeless_prompts_end_the_run(staleness):
    schedule = Schedule(workload(8, 1, 0.0, 0.0, 0.1), Speed(0.1), max_staleness=staleness, max_gen_batches=3)
    with pytest.raises(ConfigError):
        simulated(schedule)
