"""The commands of a script that start training, and their settings."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hone.apps.verl.launch.words import Argument, Started, is_open, is_setting, opened

_PROGRAM = re.compile(r"(?:.*[./])?(?:main_\w+|\w*trainer\w*|main|train\w*)(?:\.py)?")
_MODULE = re.compile(r"\w+(?:\.\w+)*\.(?:main_\w+|\w*trainer\w*)")
"""A module that another one is to run: ``python3 -m launcher module``."""
_SFT = re.compile(r".*sft.*")
_SFT_KEY = re.compile(r"[+~]*(?:model|optim|engine)\b")
_OPTIONS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")
_OTHER_PROGRAMS = ("main_eval", "main_generation", "main_generation_server", "model_merger", "legacy_model_merger")
"""Programs of verl that train nothing."""


@dataclass(frozen=True)
class Launch:
    """One training command."""

    program: str  # the module or file that is run
    line: int  # where the command begins
    settings: tuple[Argument, ...]  # words that set keys
    options: dict[str, str]  # ``--config-name`` and its kin: name to value
    strays: tuple[Argument, ...]  # words that are neither
    environment: tuple[str, ...]  # names of variables set for this command alone
    processes: str | None = None  # how many of it the launcher starts on a node, as written; None where it does not say

    @property
    def command(self) -> str:
        """The equivalent command of Hone, train or sft, by the program, or by the keys if the program is unknown."""
        if is_open(self.program):
            return "sft" if any(_SFT_KEY.match(setting.text) for setting in self.settings) else "train"
        return "sft" if _SFT.fullmatch(self.program) else "train"


def launches(started: Iterable[Started]) -> tuple[list[Launch], list[Argument]]:
    """Return the training commands among ``started``, and settings that form a separate command.

    A comment between continued lines ends a command, and a shell takes the next lines for another program. Their settings
    belong to the training command before them.
    """
    training_commands: list[Launch] = []
    lost: list[Argument] = []
    for command in started:
        launch = _launch(command)
        if launch is not None:
            training_commands.append(launch)
        elif command.words and is_setting(command.words[0].text):
            lost.extend(command.words)
    return training_commands, lost


def other_programs(started: Iterable[Started]) -> list[tuple[int, str]]:
    """Return line and name of each program of verl among ``started`` that trains nothing."""
    words = (word for command in started for word in command.words)
    return [(word.line, word.text) for word in words if _name(word.text) in _OTHER_PROGRAMS]


def _name(program: str) -> str:
    """Return the last part of a module or file."""
    return program.removesuffix(".py").replace("/", ".").rpartition(".")[2]


def _launch(command: Started) -> Launch | None:
    words = [argument.text for argument in command.words]
    at = _program(words)
    if at is None:
        return None
    program = words[at]
    settings, strays, options = [], [], {}
    rest = list(command.words[at + 1 :])
    while rest:
        argument = rest.pop(0)
        name, equals, value = argument.text.partition("=")
        if name in _OPTIONS:
            options[name] = value if equals else (rest.pop(0).text if rest else "")
        elif is_setting(argument.text) or re.match(r"(\+{0,2}|~)[A-Za-z_]\w*=", argument.text):
            settings.append(argument)
        elif argument.text.strip():
            strays.append(argument)
    return Launch(
        program, command.line, tuple(settings), options, tuple(strays), command.environment, _processes(words[:at])
    )


def _processes(words: list[str]) -> str | None:
    """Return the value of ``--nproc_per_node`` of a launcher."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("-", "_") == "nproc_per_node":
            return opened(value if equals else words[at + 1] if at + 1 < len(words) else "")
    return None


def _program(words: list[str]) -> int | None:
    """Return the index of the training program among the words of a command; None when it does not train."""
    first = next((at for at, word in enumerate(words) if is_setting(word)), None)
    if first == 1 and is_open(words[0]):
        return 0
    candidates = [at for at, word in enumerate(words[: first if first is not None else len(words)]) if _runs(words, at)]
    for at in reversed(candidates):
        if _name(words[at]) in _OTHER_PROGRAMS:
            return None
        if first is not None or _PROGRAM.fullmatch(words[at]):
            return at
    return None


def _runs(words: list[str], at: int) -> bool:
    """Return whether ``words[at]`` is the program of an interpreter or launcher."""
    if at == 0:
        return False
    if words[at - 1] == "-m" or (words[at - 2 : at - 1] == ["-m"] and _MODULE.fullmatch(words[at])):
        return True
    if words[at].endswith(".py"):
        return not words[at - 1].startswith("-") or words[at - 1] in ("-u", "-O", "--")
    return words[at - 1].rpartition("/")[2] == "hone" and words[at] in ("train", "sft")
