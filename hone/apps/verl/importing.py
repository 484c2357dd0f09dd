"""Translating a run of verl (a launch script, a YAML file, or override lines) into a configuration of Hone.

Nothing is executed. Every setting is translated with the table of :mod:`hone.config.migration`. Outcome and reason are stored
with it, so that the result can report the differences line by line.
Defaults of verl that differ from Hone's become explicit settings, so that a translation means the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.apps.verl.launch import (
    ALWAYS_SET,
    UNDECIDED,
    Argument,
    End,
    Launch,
    Trouble,
    launches,
    open_names,
    opened,
    other_programs,
    shown,
)
from hone.apps.verl.script import Trace, follow
from hone.config.keys import blocks, documentation, leaf_of, nearest_keys, yaml_value
from hone.config.migration import DEFAULTS, LLAMA_FACTORY, TABLES, Outcome, Reading, read_by, read_setting
from hone.config.migration.entries import Foreign, Unsupported
from hone.config.offline import SFTConfig
from hone.config.overrides import override_value, parse_overrides
from hone.config.trees import TREES
from hone.errors import ConfigError, did_you_mean

_OLD_SFT_KEYS = {
    "model.partial_pretrain", "optim.lr_scheduler", "optim.warmup_steps_ratio",
    "data.multiturn.enable", "data.multiturn.messages_key", "data.prompt_key", "data.response_key",
}  # fmt: skip
"""Keys that only the older of verl's two trainers for supervised fine-tuning has."""


def complete(translation: Translation) -> None:
    if translation.command == "sft":
        _complete_sft(translation)
        return
    values = translation.values
    _defaults(translation, DEFAULTS["train"])
    batch, mini = values["data.train_batch_size"], values["actor_rollout_ref.actor.ppo_mini_batch_size"]
    if isinstance(batch, int) and isinstance(mini, int) and mini > batch:
        translation.add("actor_rollout_ref.actor.ppo_mini_batch_size", batch, f"{mini} is more than a batch has")
    _placement(translation)
    _token_budgets(translation)
    if values.get("trainer.test_freq", -1) == -1:
        translation.remarks.append(Trouble(0, "trainer.test_freq=-1 validates once, at the end; 0 never does"))
    if values.get("trainer.save_freq", -1) == -1:
        translation.remarks.append(Trouble(0, "trainer.save_freq=-1 saves once, at the end; 0 never does"))


def _defaults(translation: Translation, defaults: dict[str, Any]) -> None:
    for key, value in defaults.items():
        if key not in translation.values:
            translation.add(key, value, "verl's default")


def _complete_sft(translation: Translation) -> None:
    """Complete a translation for supervised fine-tuning, whose two trainers in verl have different defaults."""
    requested = {line.reading.key: line.reading.value for line in translation.lines}
    _defaults(translation, DEFAULTS["fsdp_sft" if requested.keys() & _OLD_SFT_KEYS else "sft"])
    _several_processes(translation)
    values, budget = translation.values, "data.max_token_len_per_gpu"
    longest = values.get("data.max_length", 1024)
    if not isinstance(longest, int):
        return
    micro = requested.get("data.micro_batch_size_per_gpu")
    if (
        isinstance(micro, int)
        and micro > 0
        and budget not in values
        and requested.get("data.use_dynamic_bsz") is not True
    ):
        translation.add(budget, micro * longest, f"{micro} conversations of at most {longest} tokens")
    present = values.get(budget, longest)
    if isinstance(present, int) and present < longest:
        translation.add(budget, longest, f"{present} tokens are less than the longest conversation has, {longest}")


def _placement(translation: Translation) -> None:
    """Select Ray for several devices or a separate pool for generation."""
    values, rollout = translation.values, "actor_rollout_ref.rollout"
    if f"{rollout}.nnodes" in values:
        translation.add(f"{rollout}.enable_resource_pool", True, "generation has separate nodes")
    elif f"{rollout}.n_gpus_per_node" in values:
        translation.leave_out(f"{rollout}.n_gpus_per_node", f"{rollout}.enable_resource_pool=false")
    pools = any(key.endswith(".enable_resource_pool") and value is True for key, value in values.items())
    _several_processes(translation, pools=pools)


def _several_processes(translation: Translation, *, pools: bool = False) -> None:
    """Select Ray for several devices, or where a role has separate ones."""
    values = translation.values
    sizes = [values.get(f"trainer.{name}", 1) for name in ("nnodes", "n_gpus_per_node")]
    if "trainer.runtime" not in values and (pools or any(size != 1 for size in sizes)):
        translation.add("trainer.runtime", "ray", "several devices are several processes")
    if "ray.address" not in values and sizes[0] != 1:
        translation.add("ray.address", "auto", "several nodes need a running cluster")


def _token_budgets(translation: Translation) -> None:
    """Set every token budget to at least the longest sequence, and to the size of a micro-batch of verl."""
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
        translation.add(budget, max(1, micro) * longest, f"{micro} sequences of at most {longest} tokens")
    for key in (budget, "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"):
        present = values.get(key, defaults[key])
        if isinstance(present, int) and present < longest:
            translation.add(key, longest, f"{present} tokens are less than the longest sequence has, {longest}")


def translate(lines: list[Argument], translation: Translation) -> None:
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
    for line in lines:
        for name in UNDECIDED:
            if name in open_names(line.text):
                what = f"{shown(line.text)}: only the machine knows what the command prints; write it instead of {name}"
                translation.remarks.append(Trouble(line.line, what))
    for name in dict.fromkeys(name for line in lines for name in open_names(line.text)):
        if name not in (*UNDECIDED, *ALWAYS_SET):
            translation.remarks.append(
                Trouble(0, f"the script does not set {name}: give it as an environment variable")
            )


def _settings(line: Argument, translation: Translation) -> Iterator[tuple[Argument, str, Any, bool]]:
    """Yield ``(line, key, value, removed)`` of an override, which may set several keys of a block."""
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
    """Replace ``~`` in ``key=~/data`` by the home directory, because Hydra cannot read the tilde."""
    return re.sub(r"^([^=]+=['\"]?)~/", r"\1${oc.env:HOME}/", text)


def _spread(path: str, value: Any, schema: type) -> Iterator[tuple[str, Any]]:
    whole = leaf_of(path, schema) is not None or isinstance(TABLES[schema].find(path), Foreign | Unsupported)
    if isinstance(value, dict) and value and not whole:
        for name, item in value.items():
            yield from _spread(f"{path}.{name}", item, schema)
    else:
        yield path, value


def _removal(key: str, schema: type) -> Reading:
    known = leaf_of(key, schema) is not None or key in blocks(schema) or TABLES[schema].find(key) is not None
    return Reading(key, None, Outcome.SETTLED if known else Outcome.UNKNOWN, says="left at its default")


def _typed(path: str, value: Any, schema: type) -> Any:
    """Return the value; a number from an environment variable gets the key's default as fallback."""
    key = leaf_of(path, schema)
    if key is None or not isinstance(value, str) or "string" in key.type or "path" in key.type:
        return value
    return re.sub(r"\$\{oc\.env:(\w+),\1\}", lambda m: f"${{oc.env:{m[1]},{yaml_value(key.default)}}}", value)


_DEFAULTS: dict[str, Any] = {
    "data.max_length": 2048,
    "data.truncation": "right",
    "data.train_batch_size": 8,
    "model.enable_gradient_checkpointing": True,
    "optim.lr": 5e-5,
    "optim.weight_decay": 0.0,
    "trainer.total_epochs": 3,
}
"""Where LLaMA-Factory's defaults differ from Hone's."""
_LORA_RANK = 8
"""LLaMA-Factory's rank of adapters; alpha is twice the rank."""


def is_llama_factory(tree: Mapping[str, Any]) -> bool:
    """Return whether a mapping of keys is a configuration of LLaMA-Factory."""
    return "model_name_or_path" in tree


def import_llama_factory(tree: Mapping[str, Any]) -> Translation:
    """Translate the keys of a file; those without an entry are not understood."""
    translation = Translation("sft")
    for key, value in tree.items():
        text, entry = f"{key}: {yaml_value(value)}", LLAMA_FACTORY.find(key)
        if entry is None:
            near = did_you_mean(key, [name for name in LLAMA_FACTORY.paths() if name not in tree])
            translation.not_understood.append(Trouble(0, f"{text}: unknown key; {near}"))
            continue
        reading: Reading = read_by(entry, key, value, tree, SFTConfig)
        translation.lines.append(Line(0, text, reading))
        if reading.outcome is not Outcome.UNKNOWN:
            translation.values |= reading.sets
    _complete(translation, tree)
    return translation


def _complete(translation: Translation, tree: Mapping[str, Any]) -> None:
    """Add LLaMA-Factory's defaults that differ from Hone's, and what a file cannot say."""
    values = translation.values
    if tree.get("finetuning_type", "lora") == "lora":
        if "model.lora_rank" not in values:
            translation.add("model.lora_rank", _LORA_RANK, "LLaMA-Factory's default")
        if "model.lora_alpha" not in values:
            translation.add(
                "model.lora_alpha", 2 * values["model.lora_rank"], "twice the rank, LLaMA-Factory's default"
            )
    else:
        translation.leave_out("model.lora_rank", "finetuning_type=full")
    for key, value in _DEFAULTS.items():
        if key not in values:
            translation.add(key, value, "LLaMA-Factory's default")
    if "optim.lr_scheduler_type" not in values:
        what = "LLaMA-Factory's default schedule is linear; optim.lr_scheduler_type is constant or cosine"
        translation.remarks.append(Trouble(0, what))
    what = "data.train_batch_size is for one device: multiply it by the number of devices of the run"
    translation.remarks.append(Trouble(0, what))


_KNOWN_FILES = ("ppo_trainer", "ppo_megatron_trainer", "sft_trainer", "sft_trainer_engine", "dapo_trainer")
"""Names of verl's own configuration files: they hold its defaults."""
_OVERRIDE = re.compile(r"[+~]*[\w.@/]+=|~[\w.]+$")
_SFT_BLOCKS, _RL_BLOCKS = {"model", "optim", "engine"}, {"actor_rollout_ref", "critic", "algorithm", "reward_model"}


def import_script(
    source: str,  # text of the script, or one override per line
    *,
    directory: Path,
    arguments: Sequence[str] = (),
    number: int | None = None,  # number of the training command, from 1; needed when there are several
    variables: Mapping[str, str] | None = None,  # variables of the environment in which the script would run
) -> Translation:
    """Translate a launch script, or the override lines of a file."""
    trace = follow(source, directory=str(directory), arguments=arguments, variables=variables)
    training_commands, lost = launches(trace.started)
    if not training_commands:
        return _without_training(source, trace)
    launch = _chosen(training_commands, number)
    translation = Translation(launch.command, environment=launch.environment)
    translation.remarks += trace.remarks
    translation.not_understood += trace.troubles
    _report_other_words(launch, translation)
    lines = [*_file_settings(launch, directory, translation), *launch.settings]
    lost = [word for word in lost if word.line > launch.line and word.text.strip()]
    if lost and launch is training_commands[-1]:
        what = "a comment above ends the command in a shell; the settings after it are used anyway"
        translation.remarks.append(Trouble(lost[0].line, what))
        lines += lost
    translate(lines, translation)
    if launch.command == "sft" and launch.processes is not None:
        _add_processes(launch, launch.processes, translation)
    if "one_step_off" in launch.program:
        translation.add("trainer.async_training.max_staleness", 1, "the next batch is generated during training")
    if not launch.program.endswith(("hone", "train")) or "." in launch.program:
        complete(translation)
    return translation


def _add_processes(launch: Launch, processes: str, translation: Translation) -> None:
    """Set the workers of a node to the number of processes that a launcher starts there."""
    if not processes.isdigit():
        what = f"the launcher starts {processes} processes on a node; set trainer.n_gpus_per_node to that number"
        translation.remarks.append(Trouble(launch.line, what))
    elif translation.values.get("trainer.n_gpus_per_node", 1) != int(processes):
        translation.add(
            "trainer.n_gpus_per_node", int(processes), f"the launcher starts {processes} processes on a node"
        )


def _without_training(source: str, trace: Trace) -> Translation:
    """Translate override lines; a script that starts no training is not understood."""
    if trace.end is not None:
        return Translation(not_understood=[*trace.troubles, _ended(trace.end)])
    others = [Trouble(line, f"{name} trains nothing") for line, name in other_programs(trace.started)]
    lines = _plain_lines(source)
    settings = sum(_OVERRIDE.match(line.text) is not None for line in lines)
    if not others and not source.startswith("#!") and 0 < len(lines) <= 2 * settings:
        return import_overrides(lines)
    nothing = [Trouble(0, "the script starts no training command")]
    return Translation(not_understood=others or trace.troubles or nothing)


def _ended(end: End) -> Trouble:
    what = f"the script ends here ({end.command}), before a training command"
    if end.variables:
        what += f"; a condition asks for {', '.join(end.variables)}: give the value with --set {end.variables[0]}=VALUE"
    return Trouble(end.line, what)


def _report_other_words(launch: Launch, translation: Translation) -> None:
    """Report why each word that does not set a key is not translated."""
    for word in launch.strays:
        text = shown(word.text)
        if re.fullmatch(r"(\$\w+|\$\(\.\.\.\))+", text) and text != word.text:
            what = f"{text} is among the settings, but its content is unknown until the script runs, so it is not translated"
            notes = translation.remarks if launch.settings else translation.not_understood
            notes.append(Trouble(word.line, what))
        else:
            translation.not_understood.append(Trouble(word.line, text))


def import_overrides(lines: Sequence[Argument]) -> Translation:
    """Translate override lines of verl, for reinforcement learning or supervised fine-tuning according to their blocks."""
    translation = Translation(_command_of(line.text.lstrip("+~") for line in lines))
    translate(list(lines), translation)
    complete(translation)
    return translation


def import_yaml(source: str) -> Translation:
    """Translate a configuration file of verl, or of LLaMA-Factory."""
    tree = _mapping(source, "the file")
    if is_llama_factory(tree):
        return import_llama_factory(tree)
    lines = _flat(tree)
    translation = Translation(_command_of(line.text for line in lines))
    translate(lines, translation)
    complete(translation)
    return translation


def _command_of(keys: Iterable[str]) -> str:
    """Return the command of some keys: supervised fine-tuning has a top-level block model, reinforcement learning has roles."""
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
    """Return the line as a shell passes it to a program, when it is a single shell word."""
    trace = follow(f"line {text}")
    words = [word.text for command in trace.started for word in command.words[1:]]
    plain = words[0] if len(words) == 1 and not trace.troubles and "${" not in text else text
    return plain if not parse_overrides([plain])[1] else text


def _chosen(commands: list[Launch], number: int | None) -> Launch:
    if number is not None and 1 <= number <= len(commands):
        return commands[number - 1]
    if len(commands) == 1 and number is None:
        return commands[0]
    listed = "; ".join(f"{at}: {launch.program} in line {launch.line}" for at, launch in enumerate(commands, start=1))
    raise ConfigError(
        f"the script starts {len(commands)} training commands ({listed})",
        why="a configuration describes one run",
        fix=f"choose one with --launch 1 ... --launch {len(commands)}",
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


@dataclass(frozen=True)
class Line:
    """A setting with its line number and its outcome."""

    number: int
    text: str
    reading: Reading


@dataclass(frozen=True)
class Addition:
    """A value that the translation needs and no line sets."""

    key: str
    value: Any
    why: str


@dataclass
class Translation:
    """A translated run of verl or LLaMA-Factory."""

    command: str = "train"  # command of the configuration: train or sft
    lines: list[Line] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)  # key to value, in Hone's tree
    additions: list[Addition] = field(default_factory=list)  # values that no line sets
    not_understood: list[Trouble] = field(default_factory=list)  # lines that could not be translated
    remarks: list[Trouble] = field(default_factory=list)
    # names of variables that the launch sets for itself; they are not part of a configuration
    environment: tuple[str, ...] = ()

    def leave_out(self, key: str, why: str) -> None:
        """Remove a value without effect and its entries, and mark the lines that set it."""
        gone = {path for path in self.values if path == key or path.startswith(f"{key}.")}
        self.values = {path: value for path, value in self.values.items() if path not in gone}
        self.additions = [addition for addition in self.additions if addition.key not in gone]
        for at, line in enumerate(self.lines):
            if gone & line.reading.sets.keys():
                reported = Reading(line.reading.key, line.reading.value, Outcome.WITHOUT_EFFECT, says=why)
                self.lines[at] = Line(line.number, line.text, reported)

    def add(self, key: str, value: Any, why: str) -> None:
        self.values[key] = value
        self.additions.append(Addition(key, value, why))

    def tree(self) -> dict[str, Any]:
        """Return the values as nested mappings, in the order of the tree."""
        order = {key.path: at for at, key in enumerate(documentation(TREES[self.command]))}
        nested: dict[str, Any] = {}
        for path in sorted(self.values, key=lambda path: order.get(path, len(order))):
            *blocks, last = path.split(".")
            inner = nested
            for block in blocks:
                inner = inner.setdefault(block, {})
            inner[last] = self.values[path]
        return nested
