"""Forecast of a run under other schedules: synchronous, asynchronous, partial rollouts, more replicas."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import mean, median

from rich.table import Table

from hone.apps.lab.schedule.measured import MeasuredRun
from hone.apps.lab.schedule.simulation import Schedule, simulate


@dataclass(frozen=True)
class Forecast:
    """Prediction for one schedule, after its first batches; idle times are shares, staleness is that of the mean token."""

    name: str
    replicas: int
    step_seconds: float
    engine_idle: float
    trainer_idle: float
    staleness: float
    tokens_per_second: float
    # of each engine where it shares cores with the trainer; of several splits the fastest
    engine_threads: int | None = None


def forecast(schedule: Schedule, name: str = "") -> Forecast:
    """Simulate a schedule and measure it from the moment at which its pipeline is full."""
    steps = simulate(schedule)[schedule.max_staleness :]
    first, last = steps[0], steps[-1]
    counted, elapsed = steps[1:], last.published - first.published
    busy = last.engine_busy - first.engine_busy
    return Forecast(
        name,
        schedule.replicas,
        elapsed / len(counted),
        1 - busy / (schedule.replicas * elapsed),
        1 - sum(step.updated - step.batch_complete for step in counted) / elapsed,
        mean(step.staleness for step in counted),
        sum(step.tokens for step in counted) / elapsed,
    )


def alternatives(run: MeasuredRun) -> list[Forecast]:
    """Return forecasts for synchronous and asynchronous training, on devices of their own also with twice the replicas."""
    made, schedule = [], run.schedule
    for replicas in (schedule.replicas,) if run.cores else (schedule.replicas, 2 * schedule.replicas):
        for staleness, partial in ((0, False), (1, False), (1, True), (2, False), (2, True)):
            name = f"staleness {staleness}{', partial' if partial else ''}" if staleness else "synchronous"
            steps = schedule.steps - schedule.max_staleness + staleness
            changes = {"max_staleness": staleness, "partial_rollouts": partial, "replicas": replicas, "steps": steps}
            splits = run.cores.splits(run.scheduled(**changes)) if run.cores else [None]
            ways = [
                replace(forecast(run.scheduled(threads, **changes), name), engine_threads=threads) for threads in splits
            ]
            made.append(min(ways, key=lambda one: one.step_seconds))
    return made


def back_test(run: MeasuredRun) -> tuple[float, float]:
    """Return the predicted and the recorded median seconds of a step that the fit has not seen."""
    return forecast(run.schedule).step_seconds, median(run.held_out)


def table(forecasts: list[Forecast]) -> Table:
    names = ("schedule", "replicas", "step s", "engine idle", "trainer idle", "staleness", "tokens/s")
    threads = any(one.engine_threads for one in forecasts)
    shown = Table()
    for name in (*names, *(["engine_threads"] if threads else [])):
        shown.add_column(name, no_wrap=name == "schedule")
    for one in forecasts:
        cells = (f"{one.step_seconds:.3g}", f"{one.engine_idle:.0%}", f"{one.trainer_idle:.0%}", f"{one.staleness:.2f}")
        shown.add_row(
            *(one.name, str(one.replicas), *cells, f"{one.tokens_per_second:.4g}"),
            *([str(one.engine_threads or "")] if threads else []),
        )
    return shown
