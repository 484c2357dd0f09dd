"""Launch scripts: the grammar of bash, from tree-sitter, words with marks for what only the machine knows, and training commands.

A variable that the script does not set, or the output of a program, stays open. It is kept as a mark inside the text, which
:func:`opened` turns into an interpolation that reads the environment variable of that name.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

_MARK = re.compile("\ue000([^\ue001\ue002]*)\ue002?\ue001")
_SETTING = re.compile(r"(?:\+{0,2}|~)[A-Za-z_]\w*(?:[.@/][\w*-]+)+=|~[A-Za-z_][\w.]*$")
ALWAYS_SET = ("HOME", "USER")
UNDECIDED = ("OUTPUT", "ARGUMENTS")
"""Marks that are not variables: a program's output, the number of arguments."""


@dataclass(frozen=True)
class Argument:
    """One expanded word of a command, and the line it is written on."""

    text: str
    line: int


@dataclass(frozen=True)
class Started:
    """A command that the script would start."""

    words: tuple[Argument, ...]
    environment: tuple[str, ...]  # names of variables set for this command alone
    line: int  # where the command begins


@dataclass(frozen=True)
class Trouble:
    """A line, and a remark about it."""

    line: int
    what: str


def is_setting(text: str) -> bool:
    """Return whether a word has the form ``block.key=value``, with or without one of Hydra's prefixes."""
    return _SETTING.match(text) is not None


def mark(name: str, *, computed: bool = False) -> str:
    """Return the text that stands for a value which the script does not state; ``computed``: a program's output sets it."""
    return f"\ue000{name}\ue002\ue001" if computed else f"\ue000{name}\ue001"


def is_open(text: str) -> bool:
    """Return whether a text contains a mark."""
    return "\ue000" in text


def open_names(text: str) -> list[str]:
    """Return the names of the marks in a text."""
    return _MARK.findall(text)


def opened(text: str) -> str:
    """Return the text with each mark as an interpolation: the environment variable, or its name where it is not set.

    >>> opened(f"{mark('DATA')}/train.parquet")
    '${oc.env:DATA,DATA}/train.parquet'
    """
    return _MARK.sub(lambda m: f"${{oc.env:{m[1]}}}" if m[1] in ALWAYS_SET else f"${{oc.env:{m[1]},{m[1]}}}", text)


def shown(text: str) -> str:
    """Return the text with each mark as a shell script writes it.

    >>> shown(f"{mark('DATA')}/train.parquet")
    '$DATA/train.parquet'
    """
    return _MARK.sub(lambda m: "$(...)" if m[1] in UNDECIDED else f"${m[1]}", text)


EXPANSIONS = ("simple_expansion", "expansion", "command_substitution", "arithmetic_expansion")

_SPELLINGS = re.compile(
    r"""<<-?\s*(['"])(?P<end>\w+)\1.*?\n\s*(?P=end)$"""  # a here-document without expansions
    r"""|(?<!\S)\#[^\n]*|'[^']*'|\\.|"(?:\\.|[^"\\])*"|`[^`]*`|\$[A-Za-z_]\w*""",
    re.DOTALL | re.MULTILINE,
)
_BACKQUOTED = re.compile("`([^`]*)`")


@functools.cache
def _parser() -> Parser:
    return Parser(Language(tree_sitter_bash.language()))


def parse(source: str) -> Node:
    """Return the syntax tree of a script. Spellings that the grammar misreads are rewritten first, on the same lines."""
    source = _SPELLINGS.sub(_plainer, source)
    return _parser().parse(re.sub(r"\$\(\(\(", "$(( (", source).encode()).root_node


def _plainer(spelling: re.Match[str]) -> str:
    """Return ``$(command)`` for backquotes, also in double quotes, and ``${name}`` for an unquoted ``$name``."""
    text = spelling[0]
    if text[0] in '`"':
        return _BACKQUOTED.sub(_substitution, text)
    return f"${{{text[1:]}}}" if text[0] == "$" else text


def _substitution(backquoted: re.Match[str]) -> str:
    """Return ``$(command)`` for backquotes, or nothing when they hold only a comment."""
    return "" if re.match(r"\s*#[^\n]*$", backquoted[1]) else f"$({backquoted[1]})"


def text_of(node: Node | None) -> str:
    return (node.text or b"").decode() if node is not None else ""


def line_of(node: Node) -> int:
    """Return the line on which a node begins, from 1."""
    return node.start_point.row + 1


def is_arithmetic(node: Node) -> bool:
    """Return whether a command substitution is ``$((...))``, which the grammar misreads inside ``${...}``."""
    text = text_of(node).strip()
    return node.type == "command_substitution" and text.startswith("$((") and text.endswith("))")


def faults(node: Node) -> Iterator[Node]:
    """Yield the places that the grammar could not read."""
    if is_arithmetic(node):
        return
    if node.type == "ERROR" or node.is_missing:
        yield node
    for child in node.children if node.has_error else ():
        yield from faults(child)


def words_of(nodes: Iterable[Node]) -> list[list[Node]]:
    """Group the nodes that make up one word: the grammar parts some words where no blank is."""
    words: list[list[Node]] = []
    for node in nodes:
        if words and words[-1][-1].end_byte == node.start_byte:
            words[-1].append(node)
        else:
            words.append([node])
    return words


def between(node: Node, start: int, end: int) -> Iterator[Node | str]:
    """Yield the expansions, strings and words of a node between two byte offsets, and the literal text between those."""
    raw, at = node.text or b"", start
    for child in node.children:
        if child.start_byte < start or child.end_byte > end or not child.is_named:
            continue
        if child.type in ("string_content", "heredoc_content"):
            continue
        if child.start_byte > at:
            yield raw[at - node.start_byte : child.start_byte - node.start_byte].decode()
        if child.type in EXPANSIONS and (blank := re.match(r"(?:\s|\\\n)+", text_of(child))):
            yield blank[0]  # blanks before "$" belong to its token
        yield child
        at = child.end_byte
    if at < end:
        yield raw[at - node.start_byte : end - node.start_byte].decode()


_NAME = re.compile(r"\$\{?([A-Za-z_]\w*)")
_CONDITIONS = {"if_statement": "condition", "elif_clause": "condition", "case_statement": "value"}


@dataclass(frozen=True)
class End:
    """The ``exit`` at which a script ends before its last line."""

    line: int
    command: str  # its text, such as "exit 1"
    variables: tuple[str, ...]  # names in the conditions around it


def names_around(node: Node) -> tuple[str, ...]:
    """Return the names of variables in the conditions around a command, the innermost first."""
    names: list[str] = []
    place: Node | None = node
    while place is not None:
        if place.type in _CONDITIONS:
            names += [
                name
                for part in place.children_by_field_name(_CONDITIONS[place.type])
                for name in _NAME.findall(text_of(part))
            ]
        elif place.type == "list":  # [ -n "$NAME" ] || exit 1
            names += _NAME.findall(text_of(place))
        place = place.parent
    return tuple(dict.fromkeys(names))


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
