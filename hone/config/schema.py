"""Keys for editors and shells: a JSON schema of a tree, and completion as a static script, which starts no Python."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any

from hone.config.keys import KeyDoc, blocks, documentation, members_of
from hone.config.load import preset_names
from hone.config.trees import PRESET_KINDS, TREES

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
    COMPREPLY=()
    if [[ $current == "=" ]]; then key="$before"; current=""
    elif [[ $before == "=" ]]; then key="${{COMP_WORDS[COMP_CWORD-2]}}"; fi
    if [[ -n $key ]]; then
        case "$key" in
{values}
            *) COMPREPLY=($(compgen -f -- "$current")); return ;;
        esac
    elif [[ $COMP_CWORD -eq 1 ]]; then words="{commands}"
    else
        case "${{COMP_WORDS[1]}}:$before" in
{presets}
        esac
        if [[ -z $words ]]; then
            compopt -o nospace 2>/dev/null
            case "${{COMP_WORDS[1]}}" in
{keys}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -F _hone hone
"""


def completion_script(shell: str, commands: Iterable[str]) -> str:
    """Return the script for a shell of :data:`SHELLS`; ``commands`` are the names of all commands."""
    return _fish(commands) if shell == "fish" else _bash(shell, commands)


def _bash(shell: str, commands: Iterable[str]) -> str:
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
        commands=" ".join(commands),
        presets="\n".join(presets),
        keys="\n".join(keys),
    )


def _fish(commands: Iterable[str]) -> str:
    lines = ["# Completion of hone. Load it with: hone config completion fish | source"]
    lines.append(f"complete -c hone -n __fish_use_subcommand -f -a '{' '.join(commands)}'")
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
