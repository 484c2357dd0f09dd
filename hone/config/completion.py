"""Shell completion of commands, keys and values: a static script, so that completion does not start Python."""

from __future__ import annotations

from collections.abc import Iterable

from hone.config.keys import KeyDoc, documentation
from hone.config.layers import preset_names
from hone.config.trees import PRESET_KINDS, TREES

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
