"""Translating a run of verl (a launch script, a YAML file, or override lines) into a configuration of Hone.

Nothing is executed. Every setting is read with the one table of :mod:`hone.config.migration`; what it became, and why, is
kept beside it, so that the result can say line by line what differs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.config.keys import documentation
from hone.config.launch import ALWAYS_SET, UNDECIDED, Argument, Launch, Trouble, follow, launches, open_names, opened
from hone.config.migration import TABLE, Outcome, Reading, read_setting
from hone.config.migration.defaults import VERL_DEFAULTS
from hone.config.migration.entries import Foreign, Unsupported
from hone.config.migration.reading import own_key
from hone.config.overrides import override_value, parse_overrides
from hone.config.suggest import nearest_keys
from hone.config.trees import TREES
from hone.errors import ConfigError

_KNOWN_FILES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer")
"""Names of verl's own configuration files: they hold its defaults."""


@dataclass(frozen=True)
class Line:
    """A setting, where it stands, and what became of it."""

    number: int
    text: str
    reading: Reading


@dataclass(frozen=True)
class Addition:
    """A value that no line states and that the translation needs."""

    key: str
    value: Any
    why: str


@dataclass
class Translation:
    """A run of verl, translated.

    Attributes:
        command: the command that takes the configuration: train or sft.
        lines: every setting that was understood.
        values: key to value, in Hone's tree.
        additions: values that no line states.
        not_understood: lines of which nothing could be made.
        remarks: what else is to be known.
        environment: names of variables that the launch sets for itself; they are not part of a configuration.
    """

    command: str = "train"
    lines: list[Line] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    additions: list[Addition] = field(default_factory=list)
    not_understood: list[Trouble] = field(default_factory=list)
    remarks: list[Trouble] = field(default_factory=list)
    environment: tuple[str, ...] = ()

    def leave_out(self, key: str, why: str) -> None:
        """Take a value back that would have no effect, and say so at the line that set it."""
        del self.values[key]
        self.additions = [addition for addition in self.additions if addition.key != key]
        for at, line in enumerate(self.lines):
            if key in line.reading.sets:
                told = Reading(line.reading.key, line.reading.value, Outcome.WITHOUT_EFFECT, says=why)
                self.lines[at] = Line(line.number, line.text, told)

    def tree(self) -> dict[str, Any]:
        """The values as nested mappings, in the order of the tree."""
        order = {key.path: at for at, key in enumerate(documentation(TREES[self.command]))}
        nested: dict[str, Any] = {}
        for path in sorted(self.values, key=lambda path: order.get(path, len(order))):
            *blocks, last = path.split(".")
            inner = nested
            for block in blocks:
                inner = inner.setdefault(block, {})
            inner[last] = self.values[path]
        return nested


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
    translation.not_understood += [*trace.troubles, *(Trouble(word.line, word.text) for word in launch.strays)]
    lines = [*_file_settings(launch, directory, translation), *launch.settings]
    if lost and launch is found[-1]:
        translation.remarks.append(
            Trouble(
                lost[0].line,
                "a comment above ends the command for a shell; the settings after it are taken all the same",
            )
        )
        lines += [word for word in lost if word.text.strip()]
    _translate(lines, translation)
    if not launch.program.endswith(("hone", "train")) or "." in launch.program:
        _complete(translation)
    return translation


def import_overrides(lines: Sequence[Argument]) -> Translation:
    """Translate override lines of verl."""
    translation = Translation()
    _translate(list(lines), translation)
    _complete(translation)
    return translation


def import_yaml(source: str) -> Translation:
    """Translate a configuration file of verl.

    Raises:
        ConfigError: it is not a mapping in YAML.
    """
    translation = Translation()
    _translate(_flat(_mapping(source, "the file")), translation)
    _complete(translation)
    return translation


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
    from hone.config.launch.expansion import Variables
    from hone.config.launch.lexer import Lexer
    from hone.config.launch.words import ShellSyntaxError, Word

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
    from hone.config.check import yaml_value

    lines = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            lines += _flat(value, f"{path}.")
        elif name != "_target_":
            lines.append(Argument(f"{path}={yaml_value(value)}", 0))
    return lines


def _translate(lines: list[Argument], translation: Translation) -> None:
    settings = [setting for line in lines for setting in _settings(line, translation)]
    others = {key: value for _, key, value, _ in settings}
    schema = TREES[translation.command]
    for line, key, value, removed in settings:
        reading = _removal(key, schema) if removed else read_setting(key, value, others, schema)
        if reading.outcome is Outcome.UNKNOWN:
            near = [candidate.path for candidate in nearest_keys(key, schema)]
            meant = f"; did you mean {', '.join(near)}?" if near else ""
            translation.not_understood.append(Trouble(line.line, f"{opened(line.text)}: unknown key {key}{meant}"))
            continue
        translation.lines.append(Line(line.line, opened(line.text), reading))
        for path, item in reading.sets.items():
            translation.values[path] = _typed(path, item, schema)
    for name in dict.fromkeys(name for line in lines for name in open_names(line.text)):
        if name in UNDECIDED:
            translation.remarks.append(Trouble(0, f"what a command prints is left open: write it in place of {name}"))
        elif name not in ALWAYS_SET:
            translation.remarks.append(
                Trouble(0, f"the script does not set {name}: give it as an environment variable")
            )


def _settings(line: Argument, translation: Translation) -> Iterator[tuple[Argument, str, Any, bool]]:
    """``(line, key, value, removed)`` of an override, which may set several keys of a block."""
    overrides, problems = parse_overrides([_without_tilde(opened(line.text))])
    if problems:
        translation.not_understood.append(Trouble(line.line, f"{opened(line.text)}: {problems[0].what}"))
        return
    (override,) = overrides
    path = override.key_or_group
    if override.is_delete():
        yield line, path, None, True
        return
    for key, value in _spread(path, override_value(override), TREES[translation.command]):
        yield line, key, value, False


def _without_tilde(text: str) -> str:
    """``key=~/data`` with the home directory by its name: Hydra cannot read the tilde."""
    return re.sub(r"^([^=]+=['\"]?)~/", r"\1${oc.env:HOME}/", text)


def _spread(path: str, value: Any, schema: type) -> Iterator[tuple[str, Any]]:
    whole = own_key(path, schema) is not None or isinstance(TABLE.find(path), Foreign | Unsupported)
    if isinstance(value, dict) and value and not whole:
        for name, item in value.items():
            yield from _spread(f"{path}.{name}", item, schema)
    else:
        yield path, value


def _removal(key: str, schema: type) -> Reading:
    known = own_key(key, schema) is not None or TABLE.find(key) is not None
    return Reading(key, None, Outcome.SETTLED if known else Outcome.UNKNOWN, says="left at its default")


def _typed(path: str, value: Any, schema: type) -> Any:
    """The value; where a number is read from an environment that may lack it, the key's default stands in."""
    key = own_key(path, schema)
    if key is None or not isinstance(value, str) or "string" in key.type or "path" in key.type:
        return value
    from hone.config.check import yaml_value

    return re.sub(r"\$\{oc\.env:(\w+),\1\}", lambda m: f"${{oc.env:{m[1]},{yaml_value(key.default)}}}", value)


def _complete(translation: Translation) -> None:
    """Add what verl takes for granted and Hone does otherwise."""
    if translation.command != "train":
        return
    values = translation.values
    for key, value in VERL_DEFAULTS.items():
        if key not in values:
            _add(translation, key, value, "verl's default")
    batch, mini = values["data.train_batch_size"], values["actor_rollout_ref.actor.ppo_mini_batch_size"]
    if isinstance(batch, int) and isinstance(mini, int) and mini > batch:
        _add(translation, "actor_rollout_ref.actor.ppo_mini_batch_size", batch, f"{mini} is more than a batch has")
    _placement(translation)
    _token_budgets(translation)
    if values.get("trainer.test_freq", -1) == -1:
        translation.remarks.append(Trouble(0, "trainer.test_freq=-1 validates once, at the end; 0 never does"))
    if values.get("trainer.save_freq", -1) == -1:
        translation.remarks.append(Trouble(0, "trainer.save_freq=-1 saves once, at the end; 0 never does"))


def _placement(translation: Translation) -> None:
    """Several devices, or a pool for generation alone, are the business of Ray."""
    values, rollout = translation.values, "actor_rollout_ref.rollout"
    if f"{rollout}.nnodes" in values:
        _add(translation, f"{rollout}.enable_resource_pool", True, "generation has nodes of its own")
    elif f"{rollout}.n_gpus_per_node" in values:
        translation.leave_out(f"{rollout}.n_gpus_per_node", f"{rollout}.enable_resource_pool=false")
    sizes = [values.get(f"trainer.{name}", 1) for name in ("nnodes", "n_gpus_per_node")]
    pools = any(key.endswith(".enable_resource_pool") and value is True for key, value in values.items())
    if "trainer.runtime" not in values and (pools or any(size != 1 for size in sizes)):
        _add(translation, "trainer.runtime", "ray", "several devices are several processes")


def _token_budgets(translation: Translation) -> None:
    """Let every token budget take the longest sequence, and as many as a micro-batch of verl has."""
    values = translation.values
    defaults = {key.path: key.default for key in documentation(TREES["train"])}
    prompt, response = (
        values.get(key, defaults[key]) for key in ("data.max_prompt_length", "data.max_response_length")
    )
    if not isinstance(prompt, int) or not isinstance(response, int):
        return
    longest, actor = prompt + response, "actor_rollout_ref.actor"
    by_tokens = any(
        line.reading.key == f"{actor}.use_dynamic_bsz" and line.reading.value is True for line in translation.lines
    )
    micro, budget = values.get(f"{actor}.ppo_micro_batch_size_per_gpu"), f"{actor}.ppo_max_token_len_per_gpu"
    if isinstance(micro, int) and not by_tokens:
        _add(translation, budget, max(1, micro) * longest, f"{micro} sequences of at most {longest} tokens")
    for key in (budget, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"):
        present = values.get(key, defaults[key])
        if isinstance(present, int) and present < longest:
            _add(translation, key, longest, f"{present} tokens are less than the longest sequence has, {longest}")


def _add(translation: Translation, key: str, value: Any, why: str) -> None:
    translation.values[key] = value
    translation.additions.append(Addition(key, value, why))
