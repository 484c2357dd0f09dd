"""Which of a script's commands start training, and what they hand over."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hone.config.launch.expansion import opened
from hone.config.launch.script import Argument, Started, is_setting

_PROGRAM = re.compile(r"(?:.*[./])?(?:main_\w+|\w*trainer\w*|main|train\w*)(?:\.py)?")
_SFT = re.compile(r".*sft.*")
_OPTIONS = ("--config-path", "--config-name", "--config-dir", "-cp", "-cn", "-cd")
_OTHER_PROGRAMS = ("main_eval", "main_generation", "main_generation_server", "model_merger", "legacy_model_merger")


@dataclass(frozen=True)
class Launch:
    """One training command.

    Args:
        program: the module or file that is run.
        line: where the command begins.
        settings: words that set keys.
        options: ``--config-name`` and its kin: name to value.
        strays: words that are neither.
        environment: names of variables set for this command alone.
        processes: how many of it the launcher starts on a node, as written; None where it does not say.
    """

    program: str
    line: int
    settings: tuple[Argument, ...]
    options: dict[str, str]
    strays: tuple[Argument, ...]
    environment: tuple[str, ...]
    processes: str | None = None

    @property
    def command(self) -> str:
        """The command here that does the same: train or sft."""
        return "sft" if _SFT.fullmatch(self.program) else "train"


def launches(started: Iterable[Started]) -> tuple[list[Launch], list[Argument]]:
    """Return the training commands among ``started``, and settings that stand in a command of their own.

    The latter happens where a comment between continued lines ends the command: a shell would take what follows it for
    another program. They are meant for the training command before them.
    """
    found: list[Launch] = []
    lost: list[Argument] = []
    for command in started:
        launch = _launch(command)
        if launch is not None:
            found.append(launch)
        elif command.words and is_setting(command.words[0].text):
            lost.extend(command.words)
    return found, lost


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
    """What stands behind ``--nproc_per_node`` of a launcher."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name.lstrip("-").replace("-", "_") == "nproc_per_node":
            return opened(value if equals else words[at + 1] if at + 1 < len(words) else "")
    return None


def _program(words: list[str]) -> int | None:
    """The place of the trained program among the words of a command, None when it trains nothing."""
    first = next((at for at, word in enumerate(words) if is_setting(word)), None)
    candidates = [at for at, word in enumerate(words[: first if first is not None else len(words)]) if _runs(words, at)]
    for at in reversed(candidates):
        name = words[at].removesuffix(".py").replace("/", ".").rpartition(".")[2]
        if name in _OTHER_PROGRAMS:
            return None
        if first is not None or _PROGRAM.fullmatch(words[at]):
            return at
    return None


def _runs(words: list[str], at: int) -> bool:
    """Tell whether ``words[at]`` names what an interpreter or launcher is to run."""
    if at == 0:
        return False
    if words[at - 1] == "-m":
        return True
    if words[at].endswith(".py"):
        return not words[at - 1].startswith("-") or words[at - 1] in ("-u", "-O", "--")
    return words[at - 1].rpartition("/")[2] == "hone" and words[at] in ("train", "sft")
