"""`hone data template`: test of a chat template with tools and multi-turn conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def template(
    model: Annotated[Path, typer.Argument(help="model or tokenizer directory")],
    tools: Annotated[bool, typer.Option("--tools/--no-tools", help="also test tools, calls and results")] = True,
    custom_chat_template: Annotated[
        str | None, typer.Option("--template", help="Jinja file to use instead of the tokenizer's template")
    ] = None,
    renderer: Annotated[str, typer.Option(help="as multi_turn.renderer: auto, text_tools, or a family")] = "auto",
    parser: Annotated[str, typer.Option("--format", help="as multi_turn.format: auto, or a tool-call format")] = "auto",
    kwargs: Annotated[
        str, typer.Option("--kwargs", help='extra arguments of the template as JSON, like {"enable_thinking": false}')
    ] = "{}",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Test whether a chat template is append-only, ends turns, shows tools and results, and has parseable calls.

    Exit code 2 when the template cannot be used to train on conversations.
    """
    import json

    from hone.agents.rendering.verdict import examine
    from hone.data.tokenizer import load_tokenizer, stop_tokens
    from hone.errors import ConfigError

    form = "--kwargs '{\"enable_thinking\": false}'"
    try:
        arguments = json.loads(kwargs)
    except ValueError as error:
        raise ConfigError(f"--kwargs is not JSON: {error}", fix=form) from error
    if not isinstance(arguments, dict):
        raise ConfigError(f"--kwargs is {kwargs}, not a JSON object", fix=form)
    tokenizer = load_tokenizer(model, custom_chat_template=custom_chat_template)
    report = examine(
        tokenizer,
        stop_tokens(tokenizer, str(model)),
        tools=tools,
        renderer=renderer,
        parser=parser,
        template_kwargs=arguments,
    )
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2, ensure_ascii=False))
    else:
        typer.echo(f"renderer {report.renderer}, tool-call format {report.parser}")
        for check in report.checks:
            typer.echo(f"{check.outcome.value:<6} {check.name}: {check.detail}")
        typer.echo(f"verdict: {report.verdict}")
    if not report.usable:
        raise typer.Exit(2)
