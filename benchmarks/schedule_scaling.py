"""Step time against staleness for clusters of several sizes: `python benchmarks/schedule_scaling.py --out scaling.png`.

The schedules are simulated by :mod:`hone.apps.lab.schedule`, from a distribution of response lengths.

Every device adds the same share of the batch. A larger batch has a longer longest response, for which synchronous training waits.
Synchronously all devices generate, then train. Asynchronously half of them generate and half train, so each part takes twice as long.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from hone.apps.lab.schedule import Forecast, Schedule, Speed, Turn, forecast

Length = Callable[[random.Random], int]
"""Draws the tokens of a response."""


def measured_steps(devices: int) -> int:
    """Return how many steps to average: fewer for many devices, whose batches vary less and take longer to simulate."""
    return max(6, min(40, 1536 // devices))


def scaled(
    devices: int,
    staleness: int,
    length: Length,
    speed: Speed,
    *,
    update_seconds: float,
    sync_seconds: float,
    partial_rollouts: bool = False,
    prompts_per_device: int = 1,
    n: int = 8,
) -> Forecast:
    """Return the forecast for a cluster.

    Args:
        devices: number of devices, at least 2.
        staleness: bound; 0 is synchronous.
        length: distribution of response lengths.
        speed: speed of one device as an engine.
        update_seconds: seconds of an update when all devices train.
        sync_seconds: seconds of a weight sync.
        partial_rollouts: let new weights interrupt responses.
        prompts_per_device: prompts of a batch for each device.
        n: responses per prompt.
    """
    update = update_seconds * (2 if staleness else 1)
    batch = devices * prompts_per_device
    schedule = Schedule(
        lambda draw: (Turn(length(draw)),),
        speed,
        steps=staleness + 1 + measured_steps(devices),
        groups_per_batch=batch,
        n=n,
        max_staleness=staleness,
        partial_rollouts=partial_rollouts and staleness > 0,
        replicas=devices // 2 if staleness else devices,
        update_seconds=update,
        sync_seconds=sync_seconds,
    )
    return forecast(schedule, f"{devices} devices, staleness {staleness}")


def draw_scaling(
    path: Path,
    length: Length,
    speed: Speed,
    *,
    update_seconds: float,
    sync_seconds: float,
    devices: Sequence[int] = (8, 64, 512),
    bounds: Sequence[int] = (0, 1, 2, 3),
) -> dict[tuple[int, bool], list[float]]:
    """Draw step time against the staleness bound, a line per cluster, dashed with partial rollouts.

    Returns:
        Seconds of a step at each bound, by number of devices and partial rollouts.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes, seconds = figure.add_subplot(), dict[tuple[int, bool], list[float]]()
    for place, count in enumerate(devices):
        for partial in (False, True):
            lines = [
                scaled(
                    count,
                    bound,
                    length,
                    speed,
                    update_seconds=update_seconds,
                    sync_seconds=sync_seconds,
                    partial_rollouts=partial,
                )
                for bound in bounds
            ]
            seconds[count, partial] = [line.step_seconds for line in lines]
            name = f"{count} devices{', partial rollouts' if partial else ''}"
            axes.plot(bounds, seconds[count, partial], f"C{place}{'--' if partial else '-'}", marker=".", label=name)
    axes.set_xlabel("max_staleness")
    axes.set_ylabel("seconds of a step")
    axes.set_xticks(list(bounds))
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
    return seconds


UNIT = 32
"""Tokens that the simulation counts as one."""


def long_tailed(draw: random.Random) -> int:
    """Return a log-normal length with a median of 1,750 tokens, cut at 16,384."""
    return max(1, min(16_384 // UNIT, int(draw.lognormvariate(4.0, 0.9))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("schedule_scaling.png"))
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64, 512])
    options = parser.parse_args()
    speed = Speed(0.01 * UNIT, 0.0002 * UNIT)
    seconds = draw_scaling(
        options.out, long_tailed, speed, update_seconds=25.0, sync_seconds=2.0, devices=options.devices
    )
    for (devices, partial), line in seconds.items():
        print(devices, "partial" if partial else "whole", *(f"{second:.1f}" for second in line))


if __name__ == "__main__":
    main()
