"""`hone runs sheet` and `hone runs note`: one page on a run, and notes on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.run_output import PngOption, RootOption

if TYPE_CHECKING:
    from hone.apps.lab.compare import Run


def note(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    text: Annotated[str, typer.Argument(help="what to remember")],
    root: RootOption = Path("runs"),
) -> None:
    """Add a note to a run; its sheet shows it."""
    from hone.apps.lab.compare import find_run
    from hone.apps.lab.run_sheet import NOTES, add_note

    path = find_run(run, root).path
    add_note(path, text)
    typer.echo(f"wrote {path / NOTES}")


def sheet(
    run: Annotated[str, typer.Argument(help="run directory, or its name below the root")],
    base: Annotated[
        str | None, typer.Option("--base", help="run to compare with; default: the defaults of the keys")
    ] = None,
    metric: Annotated[str | None, typer.Option("--metric", help="metric of curve and verdict")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="file to write; default: print")] = None,
    png: PngOption = None,
    root: RootOption = Path("runs"),
) -> None:
    """Write one page on a run in Markdown: configuration difference, curve, notes, verdict."""
    import os

    from hone.apps.lab import run_sheet
    from hone.apps.lab.compare import find_run, headline_metrics, require_metrics
    from hone.apps.lab.confidence import compare_pair, scores_in_common
    from hone.cli.run_output import draw_curves
    from hone.insight.run_files import write_atomically

    shown = find_run(run, root)
    compared = find_run(base, root) if base else None
    if metric is not None:
        require_metrics([metric], [shown])
    verdict = None
    if compared is not None:
        scores = scores_in_common([compared, shown], metric)
        verdict = None if scores is None else compare_pair(compared, shown, scores)
    picture = None
    if png is not None:
        draw_curves(png, [shown], [metric] if metric else headline_metrics([shown])[:1])
        picture = os.path.relpath(png, out.parent if out else Path.cwd())
    page = run_sheet.sheet(
        shown,
        compared.name if compared else "the defaults",
        compared.config if compared else _defaults(shown),
        metric=metric,
        verdict=verdict,
        notes=run_sheet.read_notes(shown.path),
        picture=picture,
    )
    if out is None:
        typer.echo(page, nl=False)
    else:
        write_atomically(out, page)
        typer.echo(f"wrote {out}")


def _defaults(run: Run) -> dict[str, Any]:
    """Return the defaults of the tree that has the most keys of a run's configuration."""
    from omegaconf import OmegaConf

    from hone.apps.lab.compare import flatten
    from hone.config.trees import TREES

    trees = [dict(flatten(OmegaConf.to_container(OmegaConf.structured(tree), resolve=True))) for tree in TREES.values()]
    return max(trees, key=lambda defaults: len(defaults.keys() & run.config.keys()))
