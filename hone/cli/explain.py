"""`hone explain`: what a key, a metric, a code, a detector, a method or a term of the field means."""

from __future__ import annotations

from typing import Annotated

import typer

from hone.cli.options import Json

app = typer.Typer(add_completion=False)


@app.callback(invoke_without_command=True)
def explain_term(
    term: Annotated[
        list[str],
        typer.Argument(help="a key (rollout.n), a metric, a code (R49), a method (grpo), or words: weight sync"),
    ],
    as_json: Json = False,
) -> None:
    """Explain a configuration key, a metric, an error code, a detector, a method, or a term of the field."""
    import json

    from hone.apps.explain import explain

    answers = explain(" ".join(term))
    if as_json:
        typer.echo(json.dumps([answer.as_json() for answer in answers], indent=2, ensure_ascii=False))
    else:
        typer.echo("\n\n".join(map(str, answers)))
