"""`hone explain` and `hone algorithms`: keys, metrics, codes, terms, and the map of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import Json, new_group
from hone.cli.output import print_json
from hone.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hone.apps.explain.catalogue import Method, Recommendation


def explain(
    term: Annotated[
        list[str],
        typer.Argument(help="a key (rollout.n), a metric, a code (R49), a method (grpo), or words: weight sync"),
    ],
    as_json: Json = False,
) -> None:
    """Explain a configuration key, a metric, an error code, a detector, a method, or a term of the field."""
    from hone.apps.explain import explain

    answers = explain(" ".join(term))
    if as_json:
        print_json([answer.as_json() for answer in answers])
    else:
        typer.echo("\n\n".join(map(str, answers)))


app = new_group("List the methods, show one, or recommend one.")

Kind = Annotated[
    str | None,
    typer.Option("--kind", help="estimator, loss, kl, aggregation, correction, preference or block"),
]


@app.command("list")
def list_methods(kind: Kind = None, as_json: Json = False) -> None:
    """List every method: its kind, its formula and what it costs."""
    from hone.apps.explain.catalogue import KINDS, methods

    _check_kind(kind)
    selected = [method for method in methods() if kind in (None, method.kind)]
    if as_json:
        print_json([method.as_json() for method in selected])
        return
    for name, words in KINDS.items():
        rows = [method for method in selected if method.kind == name]
        if rows:
            typer.echo(f"{words} (--kind {name})")
            width = max(len(method.name) for method in rows)
            for method in rows:
                also = f" (also {', '.join(method.aliases)})" if method.aliases else ""
                typer.echo(f"  {method.name:<{width}}  {method.formula}{also}")
            typer.echo("")
    typer.echo("`hone algorithms show NAME` shows the details of a method.")


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="name of a method, such as grpo")],
    kind: Kind = None,
    as_json: Json = False,
) -> None:
    """Show a method: formula, paper, needs, knobs, cost, presets, and its numbers on a small case."""
    from hone.apps.explain.catalogue import find

    _check_kind(kind)
    matches = find(name, kind)
    if as_json:
        print_json([method.as_json() for method in matches])
        return
    typer.echo("\n\n".join(_described(method) for method in matches))


@app.command("recommend")
def recommend_method(
    model_size: Annotated[str | None, typer.Option(help="parameters of the policy: 500m, 7b")] = None,
    reward: Annotated[str | None, typer.Option(help="verifiable, model, dense, preference or labels")] = None,
    memory: Annotated[float | None, typer.Option(help="memory of the device in GB")] = None,
    turns: Annotated[int, typer.Option(help="assistant turns of an episode")] = 1,
    response_length: Annotated[int, typer.Option(help="longest response in tokens")] = 1024,
    single: Annotated[bool, typer.Option("--single", help="a prompt cannot be answered several times")] = False,
    moe: Annotated[bool, typer.Option("--moe", help="the policy is a mixture of experts")] = False,
    as_json: Json = False,
) -> None:
    """Recommend a method and explain the choice; prompts for options that are missing."""
    from hone.apps.explain.catalogue import Situation, recommend
    from hone.apps.explain.catalogue.recommend import REWARDS
    from hone.models.init import parse_size

    given = {"--model-size": model_size, "--reward": reward, "--memory": memory}
    missing = [option for option, value in given.items() if value is None]
    size: str = model_size or _ask("How large is the model? Its parameters, such as 500m or 7b", str, missing)
    parameters = parse_size(size)
    if reward is None:
        typer.echo("What says whether an answer is good?", err=True)
        for name, words in REWARDS.items():
            typer.echo(f"  {name:<12}{words}", err=True)
    kind: str = reward or _ask("One of these words", str, missing)
    gigabytes: float = _ask("How much memory does the GPU have, in GB?", float, missing) if memory is None else memory
    situation = Situation(
        parameters=parameters,
        reward=kind,
        memory_gb=gigabytes,
        turns=turns,
        response_length=response_length,
        grouped=not single,
        moe=moe,
    )
    chosen = recommend(situation)
    if as_json:
        import dataclasses

        print_json(dataclasses.asdict(chosen))
    else:
        _print_recommendation(chosen)


# -------------------------------------------------------------------------------------------------------------- output


def _described(method: Method) -> str:
    from hone.apps.explain.catalogue import KINDS
    from hone.apps.explain.catalogue.pages import example

    also = f", also {', '.join(method.aliases)}" if method.aliases else ""
    lines = [f"{method.name}  ({KINDS[method.kind]}{also})", "", f"    {method.formula}", "", method.description, ""]
    facts = {
        "paper": method.paper,
        "choose it": method.select,
        "needs": "; ".join(f"{need.argument}: {need.source}" for need in method.needs) or "nothing more",
        **{label.lower(): text for label, text in method.remarks.items()},
        "costs": method.cost.sentence(),
        "presets": ", ".join(method.presets) or "none",
        **({"page": f"docs/algorithms/{method.page}"} if method.page else {}),
    }
    width = max(map(len, facts))
    lines += [f"{label:<{width}}  {text}" for label, text in facts.items()]
    if method.knobs:
        lines += ["", "knobs"]
        lines += [f"  {knob.key}={knob.default}  {knob.meaning}" for knob in method.knobs]
    shown = example(method)
    if shown:
        lines += ["", shown[0], *_aligned(shown[1])]
    return "\n".join(lines)


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _print_recommendation(chosen: Recommendation) -> None:
    typer.echo(f"{chosen.method}{'' if chosen.fits else '  (does not fit)'}\n")
    typer.echo("\n".join(f"- {reason}" for reason in chosen.reasons))
    typer.echo(f"\n{chosen.command}")


# --------------------------------------------------------------------------------------------------------------- input


def _check_kind(kind: str | None) -> None:
    from hone.apps.explain.catalogue import KINDS

    if kind is not None and kind not in KINDS:
        raise ConfigError(f"unknown kind '{kind}'", where="--kind", fix=did_you_mean(kind, KINDS))


def _ask(question: str, kind: Callable[[str], Any], missing: list[str]) -> Any:
    """Prompt on the terminal; without an answer, raise an error about the options that are missing."""
    try:
        return typer.prompt(question, type=kind, err=True)
    except typer.Abort:
        typer.echo(err=True)
        values = {"--model-size": "7b", "--reward": "verifiable", "--memory": "80"}
        example = " ".join(f"{option} {value}" for option, value in values.items() if option in missing)
        raise ConfigError(
            f"not given: {', '.join(missing)}",
            why="the method depends on the model's size, on what judges an answer, and on the memory",
            fix=f"for example {example}",
            where=missing[0],
        ) from None
