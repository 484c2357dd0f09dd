"""`hone config import`: translation of a run of verl or LLaMA-Factory to a configuration of Hone."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from hone.apps.verl.importing import Translation

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT|FILE.yaml|-|key=value...",
        help="a launch script, a YAML file, - for lines on standard input, or override lines",
    ),
]


def import_(
    sources: Sources,
    out: Annotated[Path | None, typer.Option("--out", help="write the configuration to this YAML file")] = None,
    launch: Annotated[
        int | None, typer.Option("--launch", help="number of the training command in the script, from 1")
    ] = None,
    argument: Annotated[
        list[str] | None, typer.Option("--argument", help="argument of the script ($1, $2, ...); may be repeated")
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--set", help="variable of the environment that the script expects, NAME=VALUE; may be repeated"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON: configuration, lines, differences")] = False,
) -> None:
    """Translate a launch script, YAML file or override lines of verl, or a YAML file of LLaMA-Factory, into a Hone configuration.

    Nothing is executed.

    Prints the configuration as YAML, with the differences as comments. Exit code 0 when every line was translated or reported,
    2 when some were not understood.
    """
    import json

    translation = _translate(sources, argument or [], launch, _variables(variables or []))
    _leave_out_effectless(translation)
    if as_json:
        typer.echo(json.dumps(_as_json(translation), indent=2))
    text = "".join(f"# {line}".rstrip() + "\n" for line in _report(translation)) + "\n" + _yaml(translation.tree())
    if out is not None:
        _write(out, text)
        typer.echo(
            f"{out}: {len(translation.values)} keys; hone config check --config-path {out.parent} --config-name {out.stem}"
        )
    elif not as_json:
        typer.echo(text, nl=False)
    for trouble in translation.not_understood:
        typer.echo(f"not understood{_place(trouble.line)}: {trouble.what}", err=True)
    if translation.not_understood:
        raise typer.Exit(2)


def _variables(lines: list[str]) -> dict[str, str]:
    from hone.errors import ConfigError

    for line in lines:
        if not re.match(r"[A-Za-z_]\w*=", line):
            raise ConfigError(f"'{line}' is not NAME=VALUE", where="--set", fix="for example --set DEVICE=gpu")
    return dict(line.split("=", 1) for line in lines)


def _translate(sources: list[str], arguments: list[str], launch: int | None, variables: dict[str, str]) -> Translation:
    from hone.apps.verl.importing import import_overrides, import_script, import_yaml
    from hone.apps.verl.launch import Argument
    from hone.errors import ConfigError, HoneError

    if sources == ["-"]:
        return import_script(
            sys.stdin.read(), directory=Path.cwd(), arguments=arguments, number=launch, variables=variables
        )
    path = Path(sources[0])
    if len(sources) > 1 or ("=" in sources[0] and not path.is_file()) or sources[0].startswith("~"):
        return import_overrides([Argument(text, number) for number, text in enumerate(sources, start=1)])
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"'{path}' cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}",
            fix="give a launch script, a YAML file, - for standard input, or key=value lines",
        ) from error
    if path.suffix in (".yaml", ".yml"):
        return import_yaml(text)
    try:
        return import_script(text, directory=path.parent, arguments=arguments, number=launch, variables=variables)
    except HoneError as error:
        error.where = error.where or str(path)
        raise


def _leave_out_effectless(translation: Translation) -> None:
    """Remove settings without effect in combination with the others: verl ignores them, Hone refuses them."""
    from hone.config import TREES, load_config
    from hone.errors import HoneError
    from hone.preflight.rules import RULES

    overrides = [f"++{path}={_hydra(value)}" for path, value in translation.values.items()]
    try:
        config = load_config(TREES[translation.command], overrides)
    except HoneError:
        return  # `hone config check` reports invalid values
    for rule in RULES:
        if rule.code == "R23" and type(config) in rule.trees:
            for finding in rule.check(config):
                translation.leave_out(finding.error.where, finding.error.what.partition(": ")[2] or finding.error.what)


def _report(translation: Translation) -> list[str]:
    """Return the differences as lines of text."""
    from hone.config.check import yaml_value
    from hone.config.migration import Outcome

    differences = (
        *(Outcome.UNSUPPORTED, Outcome.CHANGED, Outcome.RENAMED),
        *(Outcome.WITHOUT_EFFECT, Outcome.SETTLED, Outcome.FOREIGN),
    )
    lines = [f"Configuration of `hone {translation.command}`, translated by `hone config import`."]
    if translation.not_understood:
        lines += ["", "Not understood:"]
        lines += [f"  {trouble.what}{_place(trouble.line)}" for trouble in translation.not_understood]
    for outcome in differences:
        reasons: dict[str, list[str]] = {}
        for line in translation.lines:
            if line.reading.outcome is outcome:
                reasons.setdefault(_reason(line.reading), []).append(f"{line.text}{_place(line.number)}")
        if reasons:
            lines += ["", f"{outcome.value[0].upper()}{outcome.value[1:]}:"]
            for reason, texts in reasons.items():
                lines += [f"  {text}" for text in texts]
                lines.append(f"    {reason}")
    if translation.additions:
        lines += ["", "Added:"]
        lines += [f"  {item.key}={yaml_value(item.value)}: {item.why}" for item in translation.additions]
    remarks = [f"  {trouble.what}{_place(trouble.line)}" for trouble in translation.remarks]
    if translation.environment:
        remarks.append(f"  environment variables of the launch: {', '.join(translation.environment)}")
    return [*lines, "", "Remarks:", *remarks] if remarks else lines


def _reason(reading: Any) -> str:
    from hone.config.check import yaml_value

    sets = ", ".join(f"{key}={yaml_value(value)}" for key, value in reading.sets.items())
    parts = [f"-> {sets}" if sets else "", reading.says, f"instead: {reading.instead}" if reading.instead else ""]
    return "; ".join(part for part in parts if part)


def _as_json(translation: Translation) -> dict[str, Any]:
    return {
        "command": translation.command,
        "understood": not translation.not_understood,
        "config": translation.tree(),
        "lines": [
            {
                "line": line.number,
                "text": line.text,
                "key": line.reading.key,
                "outcome": line.reading.outcome.value,
                "sets": line.reading.sets,
                "says": line.reading.says,
                "instead": line.reading.instead,
            }
            for line in translation.lines
        ],
        "added": [{"key": a.key, "value": a.value, "why": a.why} for a in translation.additions],
        "not_understood": [{"line": t.line, "what": t.what} for t in translation.not_understood],
        "remarks": [{"line": t.line, "what": t.what} for t in translation.remarks],
        "environment": list(translation.environment),
    }


def _place(line: int) -> str:
    return f" (line {line})" if line else ""


def _yaml(tree: dict[str, Any]) -> str:
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(tree)).rstrip("\n") + "\n"


def _hydra(value: Any) -> str:
    from hone.config.overrides import hydra_value

    return hydra_value(value)


def _write(path: Path, text: str) -> None:
    from hone.errors import ConfigError

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {error.strerror}", fix="--out FILE", where="--out") from error
