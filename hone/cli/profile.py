"""`hone profile`: where the time of a run goes, what to change first, and what a change gained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.apps.lab.compare import find_run
from hone.cli.options import RUNS, Json, Root, RunName
from hone.cli.output import new_console, new_table, number, print_json, print_plain
from hone.errors import HoneError

if TYPE_CHECKING:
    from rich.console import Console

    from hone.apps.lab.profile import ProcessShares, Profile


def profile(
    run: RunName,
    against: Annotated[str | None, typer.Option("--against", help="a run before a change, to compare with")] = None,
    last: Annotated[
        int | None, typer.Option("--last", help="use the newest N steps; default: all but the first", min=1)
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="write the timeline of all processes to this file, for Perfetto")
    ] = None,
    root: Root = RUNS,
    as_json: Json = False,
) -> None:
    """Show the time of a step by stage, what to change first, and the timeline of every process."""
    from hone.apps.lab.profile import process_shares, profile_run, write_chrome_trace
    from hone.insight.timeline import read_timeline

    shown = find_run(run, root)
    profiled = profile_run(shown, last)
    before = None if against is None else profile_run(find_run(against, root), last)
    timeline = read_timeline(shown.path)
    if trace is not None:
        if not timeline:
            raise HoneError(
                "the run has no timeline",
                where=str(shown.path),
                why="a trace is made of the spans that each process records while it trains",
                fix="train with trainer.timeline=true",
                code="E-profile",
            )
        write_chrome_trace(timeline, trace)
    processes = process_shares(timeline, profiled.first, profiled.last)
    if as_json:
        record = _record(profiled) | {"processes": [vars(process) for process in processes]}
        print_json(record | ({"against": _record(before)} if before else {}))
        return
    console = new_console()
    steps = f"step {profiled.last}" if profiled.steps == 1 else f"steps {profiled.first} to {profiled.last}"
    print_plain(console, f"{shown.name}, {steps}: {number(profiled.seconds)} s per step")
    _print_stages(console, profiled, before)
    _print_processes(console, processes)
    _print_advice(console, profiled)
    if trace is not None:
        print_plain(console, f"wrote {trace}; open it at https://ui.perfetto.dev or chrome://tracing")


def _record(profile: Profile) -> dict[str, object]:
    return vars(profile) | {
        "shares": {stage: profile.share(stage) for stage in profile.stages},
        "advice": [vars(advice) for advice in profile.advice],
    }


def _print_stages(console: Console, profile: Profile, before: Profile | None) -> None:
    if before is None:
        table = new_table("stage", "seconds>", "share>")
        for stage, seconds in profile.stages.items():
            table.add_row(stage, number(seconds), f"{profile.share(stage):.1%}")
            if stage == "update_weights":
                for part, taken in profile.parts.items():
                    table.add_row(f"  {part}", number(taken), f"{taken / profile.seconds:.1%}")
    else:
        table = new_table("stage", "before, s>", "after, s>", "difference, s>")
        for stage in dict.fromkeys((*before.stages, *profile.stages)):
            old, new = before.stages.get(stage, 0.0), profile.stages.get(stage, 0.0)
            table.add_row(stage, number(old), number(new), f"{new - old:+.4g}")
        table.add_row(
            "step", number(before.seconds), number(profile.seconds), f"{profile.seconds - before.seconds:+.4g}"
        )
    console.print(table)
    for name, seconds in profile.concurrent.items():
        print_plain(console, f"{name} runs during other stages, {number(seconds)} s per step")
    if before is not None:
        print_plain(console, f"speed: {before.seconds / profile.seconds:.2f} times as many steps per second")


def _print_processes(console: Console, processes: list[ProcessShares]) -> None:
    if not processes:
        return
    table = new_table("process", "work>", "wait>", "idle>", "waits most for")
    for process in processes:
        table.add_row(
            process.name,
            *(f"{share:.0%}" for share in (process.work, process.wait, process.idle)),
            process.longest_wait,
        )
    console.print(table)


def _print_advice(console: Console, profile: Profile) -> None:
    if not profile.advice:
        print_plain(console, "no stage offers much: nothing to change first")
    for rank, advice in enumerate(profile.advice, start=1):
        note = "; it changes what the run learns from" if advice.changes_training else ""
        print_plain(console, f"{rank}. {advice.change}")
        print_plain(console, f"   {advice.why} ({advice.code}): at most {advice.speedup:.2f} times as fast{note}")
