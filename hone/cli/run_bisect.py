"""`hone runs bisect`: the first thing that differs between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import Json
from hone.cli.run_output import RootOption

if TYPE_CHECKING:
    from hone.apps.lab.divergence import Bisection, Divergence

_LONG = 60


def bisect(
    good: Annotated[str, typer.Argument(metavar="GOOD", help="a run that is right")],
    bad: Annotated[str, typer.Argument(metavar="BAD", help="a run that should have been like it")],
    tolerance: Annotated[
        float,
        typer.Option("--tolerance", help="relative difference of numbers that counts as none; on GPUs 1e-3", min=0),
    ] = 0.0,
    root: RootOption = Path("runs"),
    as_json: Json = False,
) -> None:
    """Find the first thing that differs between two runs, with step, sample and likely cause.

    Compared are, in this order: config, data, prompt order, tokens, log-probs, rewards, advantages, micro-batches, loss, weights.
    Steps without stored samples are compared by their metrics; trainer.rollout_dump_freq=1 stores all.
    """
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.divergence import bisect_runs, read_trace
    from hone.cli.run_output import print_json
    from hone.errors import HoneError

    runs = [find_run(name, root) for name in (good, bad)]
    traces = [read_trace(run) for run in runs]
    result = bisect_runs(*traces, tolerance=tolerance)
    if not result.steps and not result.config:
        raise HoneError(
            f"{runs[0].name} and {runs[1].name} have no step in common",
            fix="name two runs that have trained at least one step",
            code="E-runs",
        )
    if as_json:
        print_json(vars(result) | {name: _plain(getattr(result, name)) for name in ("first", "observed")})
        return
    for line in bisection_lines(result):
        typer.echo(line)


def _plain(item: Divergence | None) -> dict[str, Any] | None:
    return None if item is None else vars(item)


def bisection_lines(result: Bisection) -> list[str]:
    compared = f"{len(result.steps)} steps in common, {result.with_samples} with samples of both runs"
    if result.first is None:
        lines = [f"no difference: {compared}"]
        return lines + [f"  {name}: {_pair(*pair)}" for name, pair in result.circumstances.items()]
    lines = [f"first difference: {_divergence(result.first)}"]
    lines += [f"  also {key}: {_pair(*pair)}" for key, pair in list(result.config.items())[1:]]
    if result.first is not result.observed:
        effect = "none in what both runs recorded" if result.observed is None else _divergence(result.observed)
        lines.append(f"first effect: {effect}")
    lines.append(f"likely cause: {result.cause}")
    lines.append(f"compared: {compared}")
    return lines


def _divergence(item: Divergence) -> str:
    where = [str(item.stage)]
    where += [] if item.step is None else [f"step {item.step}"]
    where += [] if item.sample is None else [f"sample {item.sample}"]
    return f"{', '.join(where)}: {item.what}: {_pair(item.good, item.bad)}"


def _pair(good: Any, bad: Any) -> str:
    return f"{_short(good)} -> {_short(bad)}"


def _short(value: Any) -> str:
    text = f"{value:.8g}" if isinstance(value, float) else "absent" if value is None else str(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
