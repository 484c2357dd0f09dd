"""`hone episode`: continue a recorded episode from any of its turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hone.cli.options import Json, Trust

if TYPE_CHECKING:
    from hone.apps.lab.forks import ForkedEpisode

app = typer.Typer(add_completion=False, no_args_is_help=True)
_BAR = 20


@app.callback()
def group() -> None:
    """Continue recorded episodes."""


@app.command("fork")
def fork(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    uid: Annotated[str, typer.Argument(help="dataset row of the episode, such as train:17")],
    turn: Annotated[
        int | None, typer.Option(help="fork before this turn of the policy, from 0; by default every turn")
    ] = None,
    samples: Annotated[int, typer.Option(help="continuations of each fork", min=1)] = 8,
    step: Annotated[
        int | None, typer.Option(help="step of the episode; by default the latest that is recorded")
    ] = None,
    index: Annotated[int | None, typer.Option(help="number of the episode in its group; by default the first")] = None,
    model: Annotated[
        str | None, typer.Option(help="model that continues; by default the run's newest checkpoint")
    ] = None,
    content: Annotated[
        str | None,
        typer.Option("--result", help="replace the last tool result or message before the turn by this text"),
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="of the continuations; by default the run's")] = None,
    seed: Annotated[int, typer.Option(help="of the continuations")] = 1,
    png: Annotated[Path | None, typer.Option(help="draw the success by turn into this picture")] = None,
    root: Annotated[Path, typer.Option("--root", help="folder that holds the runs")] = Path("runs"),
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Continue a recorded episode from its exact tokens, and show the success before and after each turn.

    A turn after which the success is lower was a mistake; one after which it is higher decided the episode.
    Example: hone episode fork runs/hone/agent train:17 --samples 16 --png forks.png
    """
    from dataclasses import asdict

    from hone.apps.lab.forks import ForkRequest
    from hone.apps.lab.forks import fork as play
    from hone.cli.run_output import print_json
    from hone.insight.run_files import disk_errors

    request = ForkRequest(run, uid, root, turn, samples, step, index, model, content, temperature, seed)
    episode = play(request)
    if png is not None:
        from hone.apps.lab.forks import draw

        with disk_errors(png):
            draw([(f.turn, f.success, f.interval) for f in episode.forks], f"row {uid}, step {episode.step}", png)
    if as_json:
        print_json({**asdict(episode), "forks": [f.as_json() for f in episode.forks]})
    else:
        _print(episode)


def _print(episode: ForkedEpisode) -> None:
    score = "no verdict" if episode.score is None else f"score {episode.score:g}"
    typer.echo(f"row {episode.uid}, episode {episode.index} of step {episode.step}: {score}")
    before: float | None = None
    for fork in episode.forks:
        low, high = fork.interval
        change = "" if before is None else f" ({fork.success - before:+.2f})"
        bar = "#" * round(_BAR * fork.success) if fork.passed else ""
        count = f"{sum(fork.passed)}/{len(fork.passed)}"
        typer.echo(
            f"\nbefore turn {fork.turn}: success {fork.success:.2f}{change}  {count}, 95 % in {low:.2f}..{high:.2f}  {bar}"
        )
        if fork.text:
            typer.echo(f"  turn {fork.turn}: {' '.join(fork.text.split())[:200]}")
        before = fork.success
