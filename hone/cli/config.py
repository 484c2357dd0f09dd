"""`hone config`: show, explain, compare, check and import configurations."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hone.cli.options import ConfigName, ConfigPath, Json, Kind, Of, Overrides, Preset, Trust, new_group
from hone.cli.output import print_json
from hone.cli.programs import configured, local_config
from hone.config import load_config
from hone.config.environment import written_tree
from hone.config.keys import KeyDoc, blocks, documentation, members_of, yaml_value
from hone.config.load import PRESETS, differences, explained, preset_names, read_config
from hone.config.migration import Outcome
from hone.config.overrides import hydra_value
from hone.config.trees import PRESET_KINDS, TREES
from hone.errors import ConfigError, HoneError
from hone.insight.redaction import redact_entry, redact_tree
from hone.insight.run_files import disk_errors

_TYPES = {int: "integer", float: "number", bool: "boolean", str: "string", dict: "object"}
_REFERENCE = {"type": "string", "pattern": r"\$\{.+\}"}  # an interpolation, which is allowed for any value


def json_schema(tree: type) -> dict[str, Any]:
    """Return the schema of a configuration file for the tree (JSON Schema, draft 2020-12)."""
    files = {"type": "array", "description": "Files to merge first (Hydra)."}
    nodes = {path: {"description": doc, **_block()} for path, doc in blocks(tree).items()}
    nodes[""] = _block(defaults=files)
    nodes |= {key.path: {"description": key.doc, **_leaf(key)} for key in documentation(tree)}
    for path, node in nodes.items():
        block, _, name = path.rpartition(".")
        if path:
            nodes[block]["properties"][name] = node
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Hone: {tree.__name__}", **nodes[""]}


def _block(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _leaf(key: KeyDoc) -> dict[str, Any]:
    if "texts" in key.metadata:
        options = [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]
    else:
        options = [_option(member, key.metadata) for member in members_of(key.hint)]
    strings = any(option.get("type") == "string" and "enum" not in option for option in options)
    return {"anyOf": options if strings else [*options, _REFERENCE], "default": key.default}


def _option(hint: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    if hint is type(None):
        return {"type": "null"}
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is list:
        options = {"enum": list(metadata["choices"])} if "choices" in metadata else {}
        items = {**_scalar(arguments[0]), **_bounds(metadata), **options} if arguments else {}
        length = metadata.get("length")
        return {"type": "array", "items": items, **({"minItems": length, "maxItems": length} if length else {})}
    if origin is Any:
        return {}
    if "choices" in metadata:
        return {"type": "string", "enum": list(metadata["choices"])}
    if origin is str and "words" in metadata:
        return {"type": "string", "enum": list(metadata["words"])}
    return {**_scalar(origin), **_bounds(metadata)}


def _scalar(kind: Any) -> dict[str, Any]:
    return {"type": _TYPES[kind]} if kind in _TYPES else {}


def _bounds(metadata: dict[str, Any]) -> dict[str, Any]:
    names = {"low": "minimum", "high": "maximum", "above": "exclusiveMinimum"}
    return {word: metadata[name] for name, word in names.items() if metadata.get(name) is not None}


SHELLS = ("bash", "zsh", "fish")

_BASH = """\
# Completion of hone. Load it with: source <(hone config completion {shell})
{begin}_hone() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" key="" words=""
    local place="${{COMP_WORDS[1]}}"
    COMPREPLY=()
    if [[ $current == "=" ]]; then key="$before"; current=""
    elif [[ $before == "=" ]]; then key="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    if [[ -n $key ]]; then
        case "$key" in
{values}
            *) return ;;
        esac
    elif [[ $COMP_CWORD -eq 1 ]]; then words="{commands}"
    else
        case "$place" in
{groups}
        esac
        if [[ -z $words && $current == -* ]]; then
            case "$place" in
{options}
            esac
        fi
        case "${{COMP_WORDS[1]}}:$before" in
{presets}
        esac
        if [[ -z $words ]]; then
            case "${{COMP_WORDS[1]}}" in
{keys}
            esac
            [[ -n $words ]] && compopt -o nospace 2>/dev/null
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hone hone
"""

Commands = Mapping[str, Sequence[str]]
"""Options of each command, and the names of the commands of each group, by words such as ``runs show``."""


def completion_script(shell: str, commands: Commands) -> str:
    """Return the script for a shell of :data:`SHELLS`."""
    return _fish(commands) if shell == "fish" else _bash(shell, commands)


def _bash(shell: str, commands: Commands) -> str:
    second = '[[ $COMP_CWORD -gt 2 ]] && place="$place ${COMP_WORDS[2]}" || words'
    groups = [f'            {name}) {second}="{" ".join(commands[name])}" ;;' for name in _groups(commands)]
    options = [f'                "{name}") words="{" ".join(words)}" ;;' for name, words in commands.items()]
    keys = [f'                {name}) words="{_keys(tree)}" ;;' for name, tree in TREES.items()]
    keys.append(f'                config) words="{_keys(TREES["train"])}" ;;')
    presets = [
        f'            {name}:--preset) words="{" ".join(preset_names(PRESET_KINDS[tree]))}" ;;'
        for name, tree in TREES.items()
    ]
    by_words: dict[str, list[str]] = {}
    for tree in TREES.values():
        for key in documentation(tree):
            if _values(key):
                by_words.setdefault(" ".join(_values(key)), []).append(key.path)
    values = [f'            {"|".join(dict.fromkeys(paths))}) words="{words}" ;;' for words, paths in by_words.items()]
    return _BASH.format(
        shell=shell,
        begin="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        values="\n".join(values),
        commands=" ".join(_top(commands)),
        groups="\n".join(groups),
        options="\n".join(options),
        presets="\n".join(presets),
        keys="\n".join(keys),
    )


def _top(commands: Commands) -> list[str]:
    return [name for name in commands if " " not in name]


def _groups(commands: Commands) -> list[str]:
    return list(dict.fromkeys(name.partition(" ")[0] for name in commands if " " in name))


def _fish(commands: Commands) -> str:
    lines = ["# Completion of hone. Load it with: hone config completion fish | source"]
    lines.append(f"complete -c hone -n __fish_use_subcommand -f -a '{' '.join(_top(commands))}'")
    for name, words in commands.items():
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in name.split())
        names = [word for word in words if not word.startswith("-")]
        lines += [f"complete -c hone -n '{seen}' -f -a '{' '.join(names)}'"] if names else []
        lines += [f"complete -c hone -n '{seen}' -l {word[2:]}" for word in words if word.startswith("--")]
    for name, tree in TREES.items():
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines.append(f"complete -c hone {seen} -l preset -x -a '{' '.join(preset_names(PRESET_KINDS[tree]))}'")
        for key in documentation(tree):
            words = [f"{key.path}={value}" for value in _values(key)] or [f"{key.path}="]
            lines.append(f"complete -c hone {seen} -f -a '{' '.join(words)}'")
    return "\n".join(lines) + "\n"


def _keys(tree: type) -> str:
    return " ".join(f"{key.path}=" for key in documentation(tree))


def _values(key: KeyDoc) -> list[str]:
    if "choices" in key.metadata:
        return list(key.metadata["choices"])
    return ["true", "false"] if key.type.startswith("true or false") else []


if TYPE_CHECKING:
    from hone.apps.verl.importing import Translation

app = new_group("Show and explain configuration keys.")

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT|FILE|-|key=...",
        help="a launch script, a YAML file, - for lines on standard input, or override lines",
    ),
]


@app.command("import")
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
    translation = _translate(sources, argument or [], launch, _variables(variables or []))
    _leave_out_effectless(translation)
    if as_json:
        print_json(_as_json(translation))
    text = "".join(f"# {line}".rstrip() + "\n" for line in _report(translation)) + "\n" + _yaml(translation.tree())
    if out is not None:
        with disk_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
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
    for line in lines:
        if not re.match(r"[A-Za-z_]\w*=", line):
            raise ConfigError(f"'{line}' is not NAME=VALUE", where="--set", fix="for example --set DEVICE=gpu")
    return dict(line.split("=", 1) for line in lines)


def _translate(sources: list[str], arguments: list[str], launch: int | None, variables: dict[str, str]) -> Translation:
    from hone.apps.verl.importing import import_overrides, import_script, import_yaml
    from hone.apps.verl.launch import Argument

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
    from hone.preflight.rules import RULES

    overrides = [f"++{path}={hydra_value(value)}" for path, value in translation.values.items()]
    try:
        config = load_config(TREES[translation.command], overrides)
    except HoneError:
        return  # `hone config check` reports invalid values
    for rule in RULES:
        if rule.code == "R23" and type(config) in rule.trees:
            for finding in rule.check(config) or ():
                translation.leave_out(finding.error.where, finding.error.what.partition(": ")[2] or finding.error.what)


def _report(translation: Translation) -> list[str]:
    """Return the differences as lines of text."""
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


@app.command()
def check(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    kind: Of = Kind.train,
    keys_only: Annotated[
        bool,
        typer.Option("--keys-only", help="check only keys and their arithmetic, not files, rewards or this machine"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Run all checks of a run before its start: keys, arithmetic, files, template, reward, machine.

    Prints every finding, errors first. Exit code 0 when a run could start, 2 when not.
    """
    from hone.preflight import Stage, examine

    tree = TREES[kind.value]
    config, _ = (configured if keys_only else local_config)(tree, overrides, preset, config_path, config_name)
    report = examine(config, (Stage.ARITHMETIC,) if keys_only else tuple(Stage))
    if as_json:
        print_json(report.as_json())
    else:
        errors, warnings = len(report.errors), len(report.warnings)
        counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
        typer.echo("\n".join(part for part in (report.render(), counts) if part))
    if report.stops:
        raise typer.Exit(2)


@app.command("show")
def show(
    overrides: Overrides = None,
    preset: Preset = None,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
    kind: Of = Kind.train,
    why: Annotated[
        bool, typer.Option("--why", help="the source of each value: default, preset, file, command line, derived")
    ] = False,
    changed: Annotated[bool, typer.Option("--changed", help="only the keys that were set, and where")] = False,
    derived: Annotated[
        bool,
        typer.Option(
            "--derived", help="facts derived from the keys: roles, pools, source of old log-probs, each with a reason"
        ),
    ] = False,
    diagram: Annotated[
        Path | None,
        typer.Option(
            help="draw a training step of this run: an .svg picture, or a Mermaid flowchart (.mmd; - prints it)"
        ),
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Print the configuration that a run with these arguments would have."""
    from hone.user_code import admit

    config, provenance = configured(TREES[kind.value], overrides, preset, config_path, config_name)
    if trust and (derived or diagram):
        admit(None)
    if diagram is not None:
        _draw(config, diagram)
        return
    if derived:
        _show_derived(config, as_json=as_json)
        return
    if not why and not changed:
        tree = redact_tree(written_tree(config))
        print_json(tree) if as_json else typer.echo(_yaml(tree), nl=False)
        return
    rows = {
        path: (redact_entry(path, value), source)
        for path, value, source in explained(config, provenance)
        if path in provenance or not changed
    }
    if as_json:
        print_json({path: {"value": v, "from": source} for path, (v, source) in rows.items()})
        return
    width = max((len(f"{path}={yaml_value(value)}") for path, (value, _) in rows.items()), default=0)
    for path, (value, source) in rows.items():
        typer.echo(f"{f'{path}={yaml_value(value)}':<{min(width, 70)}}  # {source}")


def _draw(config: Any, file: Path) -> None:
    from hone.apps.lab.diagram import mermaid, svg
    from hone.config.tree import RLConfig
    from hone.trainers.algorithm import Algorithm
    from hone.trainers.stages import data_flow

    kind = ".mmd" if str(file) == "-" else file.suffix.lower()
    if not isinstance(config, RLConfig) or kind not in (".mmd", ".svg"):
        what = (
            f"'{file}' ends in neither .svg nor .mmd" if isinstance(config, RLConfig) else "only hone train has stages"
        )
        raise ConfigError(what, where="--diagram", fix="hone config show --diagram step.svg, with keys of hone train")
    flow = data_flow(config, Algorithm.planned(config))
    text = svg(flow) if kind == ".svg" else mermaid(flow)
    if str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"'{file}' cannot be written: {error.strerror}"
        raise ConfigError(what, where="--diagram", fix="a file in a folder that exists") from error
    typer.echo(f"{file}: {len(flow['stages'])} stages, {flow['sequences']:,} sequences a step")


def _show_derived(config: Any, *, as_json: bool) -> None:
    from hone.config.specs import derived_lines

    lines = derived_lines(config)
    if as_json:
        print_json({line.name: {"value": line.value, "because": line.reason} for line in lines})
        return
    names, values = max(len(line.name) for line in lines), min(50, max(len(line.value) for line in lines))
    for line in lines:
        typer.echo(f"{line.name:<{names}}  {line.value:<{values}}  # {line.reason}")


@app.command("explain")
def explain(
    key: Annotated[list[str], typer.Argument(help="a key, its last parts, a block, or words: batch size")],
    kind: Annotated[Kind | None, typer.Option("--of", help="command whose keys to search; all by default")] = None,
    as_json: Json = False,
) -> None:
    """Describe a key: its meaning, type, default and related keys."""
    from hone.apps.explain.key_search import answer

    words = " ".join(key)
    kinds = [kind.value] if kind else [name.value for name in Kind]
    answers = answer(words, kinds)
    if as_json:
        print_json([entry.as_json() for entry in answers])
    else:
        typer.echo("\n".join(map(str, answers)))


@app.command("diff")
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="a YAML file, a run directory or a preset")],
    second: Annotated[str, typer.Argument(metavar="B", help="the same")],
    kind: Of = Kind.train,
    as_json: Json = False,
) -> None:
    """Show the keys in which two configurations differ. The exit code is 0 also when they differ."""
    tree = TREES[kind.value]
    changes = {
        path: (redact_entry(path, a), redact_entry(path, b))
        for path, (a, b) in differences(read_config(first, tree), read_config(second, tree)).items()
    }
    if as_json:
        print_json({path: {"a": a, "b": b} for path, (a, b) in changes.items()})
    elif not changes:
        typer.echo("no difference")
    for path, (a, b) in {} if as_json else changes.items():
        typer.echo(f"{path}: {yaml_value(a)} -> {yaml_value(b)}")


@app.command("schema")
def schema(kind: Of = Kind.train) -> None:
    """Print a JSON schema of the keys, for editors: completion and checks while a file is written."""

    print_json(json_schema(TREES[kind.value]))


class Shell(StrEnum):
    """Shells that completion is written for."""

    bash = "bash"
    zsh = "zsh"
    fish = "fish"


@app.command("completion")
def completion(shell: Annotated[Shell, typer.Argument(help="bash, zsh or fish")]) -> None:
    """Print a script that completes commands, options, keys, values and files: source <(hone config completion bash)."""
    from hone.cli.main import command_words

    typer.echo(completion_script(shell.value, command_words()), nl=False)


@app.command("presets")
def presets() -> None:
    """List the presets and what each one sets."""
    for kind in Kind:
        folder = PRESET_KINDS[TREES[kind.value]]
        for name in preset_names(folder):
            text = (PRESETS / folder / f"{name}.yaml").read_text(encoding="utf-8")
            head, _, body = text.partition("\n")
            typer.echo(f"hone {kind.value} --preset {name}: {head.removeprefix('# ')}\n")
            typer.echo("\n".join(f"    {line}" for line in body.strip().splitlines()) + "\n")
