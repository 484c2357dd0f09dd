"""Where a run of verl is described: a launch script, a YAML file, or override lines."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hone.config.check import yaml_value
from hone.config.importing.completing import complete
from hone.config.importing.settings import translate
from hone.config.importing.translation import Translation
from hone.config.launch import Argument, Launch, Trouble, follow, launches, shown
from hone.config.launch.expansion import Variables
from hone.config.launch.lexer import Lexer
from hone.config.launch.words import ShellSyntaxError, Word
from hone.config.overrides import parse_overrides
from hone.errors import ConfigError

_KNOWN_FILES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer")
"""Names of verl's own configuration files: they hold its defaults."""
_SFT_BLOCKS, _RL_BLOCKS = {"model", "optim", "engine"}, {"actor_rollout_ref", "critic", "algorithm", "reward_model"}


def import_script(
    source: str, *, directory: Path, arguments: Sequence[str] = (), number: int | None = None
) -> Translation:
    """Translate a launch script, or the override lines of a file.

    Args:
        source: the text; one override a line when it starts no training command.
        directory: where it lies, to find configuration files that it names.
        arguments: words that the script is called with.
        number: which of its training commands is meant, from 1; needed when there are several.

    Raises:
        ConfigError: there are several training commands and ``number`` does not choose one.
    """
    trace = follow(source, directory=str(directory), arguments=list(arguments))
    found, lost = launches(trace.started)
    if not found:
        translation = import_overrides(_plain_lines(source))
        if not translation.lines and not translation.not_understood:
            translation.not_understood += [*trace.troubles] or [Trouble(1, "no training command, and no key=value")]
        return translation
    launch = _chosen(found, number)
    translation = Translation(launch.command, environment=launch.environment)
    translation.remarks += trace.remarks
    translation.not_understood += trace.troubles
    for word in launch.strays:
        text = shown(word.text)
        if re.fullmatch(r"(\$\w+|\$\(\.\.\.\))+", text) and text != word.text:
            what = f"{text} stands among the settings, and what it holds is not known before the script runs: nothing of it is translated"
            told = translation.remarks if launch.settings else translation.not_understood
            told.append(Trouble(word.line, what))
        else:
            translation.not_understood.append(Trouble(word.line, text))
    lost = [word for word in lost if word.line > launch.line]
    lines = [*_file_settings(launch, directory, translation), *launch.settings]
    if lost and launch is found[-1]:
        translation.remarks.append(
            Trouble(
                lost[0].line,
                "a comment above ends the command for a shell; the settings after it are taken all the same",
            )
        )
        lines += [word for word in lost if word.text.strip()]
    if launch.command == "sft" and launch.processes not in (None, "1"):
        what = f"the launcher starts {launch.processes} processes on a node, and `hone sft` trains in one: the same numbers, later"
        translation.remarks.append(Trouble(launch.line, what))
    translate(lines, translation)
    if not launch.program.endswith(("hone", "train")) or "." in launch.program:
        complete(translation)
    return translation


def import_overrides(lines: Sequence[Argument]) -> Translation:
    """Translate override lines of verl: of reinforcement learning, or of supervised fine-tuning, as their blocks say."""
    translation = Translation(_command_of(line.text.lstrip("+~") for line in lines))
    translate(list(lines), translation)
    complete(translation)
    return translation


def import_yaml(source: str) -> Translation:
    """Translate a configuration file of verl.

    Raises:
        ConfigError: it is not a mapping in YAML.
    """
    lines = _flat(_mapping(source, "the file"))
    translation = Translation(_command_of(line.text for line in lines))
    translate(lines, translation)
    complete(translation)
    return translation


def _command_of(keys: Iterable[str]) -> str:
    """The command that keys belong to: supervised fine-tuning has its model at the top, reinforcement learning has roles."""
    blocks = {key.partition("=")[0].partition(".")[0] for key in keys}
    return "sft" if blocks & _SFT_BLOCKS and not blocks & _RL_BLOCKS else "train"


def _plain_lines(source: str) -> list[Argument]:
    """The lines of a text of overrides, shell quotes and continuations taken off."""
    lines = []
    for number, line in enumerate(source.splitlines(), start=1):
        text = line.strip().removesuffix("\\").strip()
        if text and not text.startswith("#"):
            lines.append(Argument(_unquoted(text), number))
    return lines


def _unquoted(text: str) -> str:
    """The line as a shell would hand it on, when it is one word of a shell."""
    try:
        tokens = Lexer(text).tokens()
        words = [word for token in tokens if isinstance(token, Word) for word in Variables().expand(token)]
    except (ShellSyntaxError, ValueError):
        return text
    plain = words[0] if len(tokens) == len(words) == 1 and "${" not in text else text
    return plain if not parse_overrides([plain])[1] else text


def _chosen(found: list[Launch], number: int | None) -> Launch:
    if number is not None and 1 <= number <= len(found):
        return found[number - 1]
    if len(found) == 1 and number is None:
        return found[0]
    listed = "; ".join(f"{at}: {launch.program} in line {launch.line}" for at, launch in enumerate(found, start=1))
    raise ConfigError(
        f"the script starts {len(found)} training commands ({listed})",
        why="one configuration describes one run",
        fix=f"choose one with --launch 1 ... --launch {len(found)}",
        where="--launch",
    )


def _file_settings(launch: Launch, directory: Path, translation: Translation) -> list[Argument]:
    """The settings of the configuration file that a launch names, where it can be found."""
    options = launch.options
    name = next((options[option] for option in ("--config-name", "-cn") if option in options), None)
    if name is None:
        return []
    stem = name.removesuffix(".yaml")
    folder = next((options[o] for o in ("--config-path", "--config-dir", "-cp", "-cd") if o in options), ".")
    for base in (Path(folder), directory / folder, directory / "config", directory):
        file = base / f"{stem}.yaml"
        if file.is_file():
            return _flat(_mapping(file.read_text(encoding="utf-8"), str(file)))
    if stem not in _KNOWN_FILES:
        what = (
            f"the keys of {stem}.yaml are not translated: the file is not here; `hone config import {stem}.yaml` does"
        )
        translation.remarks.append(Trouble(launch.line, what))
    return []


def _mapping(source: str, name: str) -> dict[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(source)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{name} is not valid YAML: {' '.join(str(error).split())}", fix="correct the line"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{name} holds no mapping of keys", fix="a configuration file is a mapping of blocks")
    return {key: value for key, value in tree.items() if key not in ("defaults", "hydra")}


def _flat(tree: dict[str, Any], prefix: str = "") -> list[Argument]:
    lines = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            lines += _flat(value, f"{path}.")
        elif name != "_target_":
            lines.append(Argument(f"{path}={yaml_value(value)}", 0))
    return lines
