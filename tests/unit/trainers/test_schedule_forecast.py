"""Forecasts against the code of a run on virtual time: of the same schedule, and of one that is fitted to its files."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from support.archives import archive
from support.messages import raises
from support.schedule.clock import run as on_virtual_time
from support.schedule.engine import Speed
from support.schedule.simulation import Schedule, Simulation
from support.schedule.workload import Plan, Turn, Workload
from typer.testing import CliRunner

from hone.apps.lab import schedule as simulation
from hone.apps.lab.compare import Run
from hone.apps.lab.schedule import alternatives, back_test, forecast, measured_run
from hone.cli.main import app
from hone.errors import HoneError


def long_tailed(draw: random.Random) -> Plan:
    return Plan((Turn(min(400, int(draw.lognormvariate(3, 1)) + 1)),))


TRUTH = Schedule(
    Workload(long_tailed),
    Speed(0.02, 0.001),
    steps=8,
    groups_per_batch=8,
    n=4,
    update_seconds=lambda tokens: 3.0,
    sync_seconds=0.5,
)


def played(schedule: Schedule) -> Simulation:
    """Return the run of a schedule by rollouter, player and engine client."""
    made: list[Simulation] = []

    async def whole() -> None:
        made.append(Simulation(schedule))
        await made[0].run()

    on_virtual_time(whole())
    return made[0]


def plain(schedule: Schedule) -> simulation.Schedule:
    """Return the same schedule for a forecast."""
    names = {field.name for field in dataclasses.fields(simulation.Schedule)} & vars(schedule).keys()
    values = {name: getattr(schedule, name) for name in names}
    values |= {
        "speed": simulation.Speed(schedule.speed.step, schedule.speed.per_request),
        "update_seconds": schedule.update_seconds(0),
        "draw": lambda draw: tuple(
            simulation.Turn(turn.tokens, turn.tool_seconds) for turn in schedule.workload.plan(draw).turns
        ),
    }
    return simulation.Schedule(**values)


def tools(draw: random.Random) -> Plan:
    return Plan(tuple(Turn(draw.randint(5, 60), draw.random() * 4) for _ in range(draw.randint(1, 3))))


@pytest.mark.application("hone/preflight", "hone/trainers", "tests/support/schedule")
@pytest.mark.parametrize("plan", [long_tailed, tools])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"max_staleness": 1},
        {"max_staleness": 1, "partial_rollouts": True},
        {"max_staleness": 2, "partial_rollouts": True, "ready_first": True},
    ],
)
def test_a_forecast_is_that_of_the_code_of_a_run(mode: dict[str, Any], replicas: int, plan: Any) -> None:
    schedule = dataclasses.replace(
        TRUTH, workload=Workload(plan), steps=30, rows=240, replicas=replicas, check_seconds=0.25, **mode
    )
    found, steps = forecast(plain(schedule)), played(schedule).steps[schedule.max_staleness :]
    elapsed = steps[-1].published - steps[0].published
    assert found.step_seconds == pytest.approx(elapsed / (len(steps) - 1), rel=0.1)
    assert found.engine_idle == pytest.approx(
        1 - (steps[-1].engine_busy - steps[0].engine_busy) / replicas / elapsed, abs=0.08
    )
    assert found.staleness == pytest.approx(sum(step.staleness for step in steps[1:]) / (len(steps) - 1), abs=0.15)
    assert found.tokens_per_second == pytest.approx(sum(step.tokens for step in steps[1:]) / elapsed, rel=0.2)


def recorded(schedule: Schedule, folder: Path, *, dumps: bool = True) -> Run:
    """Write the files of a run, as far as a forecast reads them, with the durations of its simulation."""
    metrics, busy = [], 0.0
    for number, step in enumerate(played(schedule).steps, 1):
        seconds = {
            "timing_s/gen": step.batch_complete - step.begun,
            "timing_s/update_weights": step.published - step.updated,
            "timing_s/step": step.published - step.begun,
        }
        seconds |= {"timing_s/update_weights_transfer": schedule.sync_seconds, "prompt_length/mean": 1.0}
        if schedule.max_staleness:
            seconds["timing_s/update_weights_drain"] = step.drained - step.updated
            seconds["replica/0/throughput"] = step.tokens / (step.engine_busy - busy)
            busy = step.engine_busy
        metrics.append({"step": number, **seconds})
    (folder / "rollouts").mkdir()
    if dumps:
        rows = [{"response_mask": [1] * tokens, "seconds": at} for tokens, at in ends(schedule)]
        archive(folder, 1, rows)
        archive(
            folder, 2, rows[:1], rows=len(rows)
        )  # a prompt that is followed does not tell what the engines had to do
    config = {
        "data.train_batch_size": schedule.groups_per_batch,
        "actor_rollout_ref.rollout.n": schedule.n,
        "trainer.async_training.max_staleness": schedule.max_staleness,
        "trainer.async_training.partial_rollouts": schedule.partial_rollouts,
    }
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "run.json").write_text("{}")
    nested: dict[str, Any] = {}
    for name, value in config.items():
        *parents, last = name.split(".")
        block = nested
        for parent in parents:
            block = block.setdefault(parent, {})
        block[last] = value
    (folder / "config.yaml").write_text(json.dumps(nested))
    return Run("run", folder, {}, metrics, config)


def ends(schedule: Schedule) -> list[tuple[int, float]]:
    """Return length and end of every response of the first batch, by a loop over decode steps."""
    lengths = [len(one.response_ids) for one in played(schedule).steps[0].trajectories]
    made = []
    for length in lengths:
        at = sum(
            schedule.speed.seconds((schedule.max_staleness + 1) * sum(other > token for other in lengths))
            for token in range(length)
        )
        made.append((length, at))
    return made


def test_a_synchronous_run_is_reproduced(tmp_path):
    run = measured_run(recorded(TRUTH, tmp_path))
    assert run.schedule.speed.step == pytest.approx(0.02, rel=0.3)
    assert run.schedule.update_seconds == pytest.approx(3.0)
    assert run.schedule.sync_seconds == 0.5
    predicted, was = back_test(run)
    assert predicted == pytest.approx(was, rel=0.2)
    truth = forecast(plain(dataclasses.replace(TRUTH, max_staleness=1, steps=10)))
    by_name = {(one.name, one.replicas): one for one in alternatives(run)}
    assert by_name["staleness 1", 1].step_seconds == pytest.approx(truth.step_seconds, rel=0.2)
    assert by_name["synchronous", 1].staleness == 0
    assert by_name["staleness 1", 2].step_seconds <= by_name["staleness 1", 1].step_seconds
    assert 0.5 < by_name["staleness 1", 1].staleness <= 1


@pytest.mark.parametrize("partial", [False, True])
def test_an_asynchronous_run_is_reproduced_by_its_throughput(tmp_path, partial):
    truth = dataclasses.replace(
        TRUTH, max_staleness=1, partial_rollouts=partial, steps=12, check_seconds=0.25, update_seconds=lambda _: 6.0
    )
    run = measured_run(recorded(truth, tmp_path))
    assert run.schedule.speed.seconds(16) == pytest.approx(truth.speed.seconds(16), rel=0.2)
    assert run.schedule.sync_seconds == 0.5 and run.schedule.check_seconds == pytest.approx(0.25)
    predicted, was = back_test(run)
    assert predicted == pytest.approx(was, rel=0.1)


def test_shared_cores_slow_what_computes_together(tmp_path):
    run = recorded(TRUTH, tmp_path)
    record = {"hardware": {"usable_cores": 8, "gpus": []}}
    measured = measured_run(dataclasses.replace(run, record=record))
    assert measured.cores is not None
    turns, overlapped = measured.scheduled(), measured.scheduled(max_staleness=1)
    assert turns.speed == measured.schedule.speed and overlapped.speed == turns.speed.scaled(2 ** math.log2(1.5))
    assert (turns.update_seconds, overlapped.update_seconds) == (3.0, pytest.approx(4.5))
    forecasts = alternatives(measured)
    assert {one.replicas for one in forecasts} == {1} and forecasts[0].engine_threads is None
    others = {
        threads: measured.scheduled(threads, max_staleness=1, steps=measured.schedule.steps + 1)
        for threads in (2, 4, 6)
    }
    fastest = min(others, key=lambda threads: forecast(others[threads]).step_seconds)
    assert (forecasts[1].engine_threads, forecasts[1].step_seconds) == (fastest, forecast(others[fastest]).step_seconds)
    assert others[6].speed == turns.speed.scaled((8 / 6) ** math.log2(1.5))
    assert others[6].update_seconds == pytest.approx(3.0 * 1.5**2)
    assert measured_run(run).cores is None


def test_a_run_without_lengths_or_steps_is_refused(tmp_path):
    (tmp_path / "a").mkdir()
    with raises(HoneError, "rollout_dump_freq"):
        measured_run(recorded(TRUTH, tmp_path / "a", dumps=False))
    (tmp_path / "b").mkdir()
    with raises(HoneError, "1 timed step"):
        measured_run(recorded(dataclasses.replace(TRUTH, steps=1), tmp_path / "b"))


def test_two_steps_are_enough(tmp_path):
    run = measured_run(recorded(dataclasses.replace(TRUTH, steps=2), tmp_path))
    assert len(run.held_out) == 1


def test_the_command_shows_the_check(tmp_path):
    recorded(TRUTH, tmp_path)
    result = CliRunner().invoke(app, ["plan", "--schedule", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["predicted_step_seconds"] == pytest.approx(answer["recorded_step_seconds"], rel=0.2)
    assert len(answer["schedules"]) == 10
