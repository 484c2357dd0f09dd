"""Following a launch script without executing it, up to the training commands that it would start."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass, field

from hone.config.launch.conditions import holds
from hone.config.launch.expansion import UNDECIDED, Variables, mark
from hone.config.launch.parser import (
    ArrayValue,
    Assignment,
    Body,
    Case,
    Command,
    For,
    Function,
    Group,
    If,
    Simple,
    While,
    parse,
)
from hone.config.launch.words import ShellSyntaxError, Text, Word

_SETTING = re.compile(r"(?:\+{0,2}|~)[A-Za-z_]\w*(?:[.@/][\w*-]+)+=|~[A-Za-z_][\w.]*$")
_ASSIGNING = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "zsh")
_DEPTH = 20


@dataclass(frozen=True)
class Argument:
    """One word of a command, expanded, and the line that it stands on."""

    text: str
    line: int


@dataclass(frozen=True)
class Started:
    """A command that the script would start."""

    words: tuple[Argument, ...]
    environment: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Trouble:
    """A line that could not be followed."""

    line: int
    what: str


@dataclass
class Trace:
    """What following a script brought to light."""

    started: list[Started] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    remarks: list[Trouble] = field(default_factory=list)


class _Exit(Exception):
    pass


def follow(source: str, *, directory: str = ".", arguments: list[str] | None = None) -> Trace:
    """Follow a script that is called with ``arguments`` and return the commands that it would start."""
    walk = _Walk(Variables(directory, arguments=list(arguments or [])))
    try:
        walk.body(parse(source))
    except ShellSyntaxError as error:
        walk.trace.troubles.append(Trouble(error.line, error.what))
    except _Exit:
        pass
    return walk.trace


class _Walk:
    def __init__(self, variables: Variables) -> None:
        self.variables, self.trace = variables, Trace()
        self.functions: dict[str, Body] = {}
        self._depth = 0

    def body(self, body: Body) -> bool | None:
        """Follow commands; returns whether the last one succeeds, None when that is open."""
        result: bool | None = True
        for connector, command in body.commands:
            if (connector == "&&" and result is False) or (connector == "||" and result is True):
                continue
            if connector == "||" and result is None and not _contains_settings(command):
                continue
            result = self._command(command)
        return result

    def _command(self, command: Command) -> bool | None:
        match command:
            case Simple():
                return self._simple(command)
            case If():
                self._if(command)
            case For(name, words, body, line):
                self._for(name, words, body, line)
            case While(body, line):
                if _contains_settings(command):
                    self._remark(line, "a loop that only the machine can decide about is left out")
            case Case():
                self._case(command)
            case Function(name, body, _):
                self.functions[name] = body
                only = _only_command(body)
                if only is not None:
                    self.variables.printers[name] = tuple(word for word in only.words if isinstance(word, Word))
            case Group(body, _):
                return self.body(body)
        return True

    def _remark(self, line: int, what: str) -> None:
        self.trace.remarks.append(Trouble(line, what))

    def _if(self, command: If) -> None:
        for condition, body in command.branches:
            truth = self.body(condition)
            if truth is None:
                self._remark(command.line, "a condition that only the machine can decide about is taken as false")
            if truth:
                self.body(body)
                return
        self.body(command.otherwise)

    def _for(self, name: str, words: tuple[Word, ...], body: Body, line: int) -> None:
        for value in [text for word in words for text in self._expanded(word)][:100]:
            self.variables.values[name] = value
            self.body(body)

    def _case(self, command: Case) -> None:
        value = self.variables.text(command.word)
        for patterns, body in command.arms:
            alternatives = [text for word in patterns for text in self.variables.text(word).split("|")]
            if any(fnmatch.fnmatchcase(value, pattern.strip()) for pattern in alternatives):
                self.body(body)
                return

    def _expanded(self, word: Word) -> list[str]:
        try:
            return self.variables.expand(word)
        except ValueError as error:
            self.trace.troubles.append(Trouble(word.line, str(error)))
            return []

    def _simple(self, command: Simple) -> bool | None:
        if not command.words:
            for assignment in command.assignments:
                self._assign(assignment)
            return True
        arguments = [
            Argument(text, word.line)
            for word in command.words
            if isinstance(word, Word)
            for text in self._expanded(word)
        ]
        names = tuple(assignment.name for assignment in command.assignments)
        return self._run(arguments, command, names)

    def _run(self, arguments: list[Argument], command: Simple, environment: tuple[str, ...]) -> bool | None:
        words = [argument.text for argument in arguments]
        match words:
            case []:
                return True
            case ["!", *_]:
                result = self._run(arguments[1:], command, environment)
                return None if result is None else not result
            case ["[", *inside, "]"] | ["[[", *inside] | ["test", *inside]:
                return holds(inside)
            case ["((", value]:
                return None if not value.lstrip("-").isdigit() else value != "0"
            case ["true" | ":" | "echo" | "set" | "source" | "." | "cd" | "mkdir" | "printf" | "ulimit", *_]:
                return True
            case ["false", *_]:
                return False
            case ["exit" | "return", *_]:
                raise _Exit
            case ["shift", *count]:
                del self.variables.arguments[: int(count[0]) if count and count[0].isdigit() else 1]
                return True
            case ["unset", *names]:
                for name in names:
                    self.variables.values.pop(name, None)
                return True
        if words[0] in _ASSIGNING:
            self._declare(command)
            return True
        if words[0] in self.functions:
            return self._call(words)
        if words[0] == "eval":
            return self._again(" ".join(words[1:]), arguments[0].line)
        script = _script_word(words)
        if script is not None:
            return self._again(words[script], arguments[script].line)
        self.trace.started.append(Started(tuple(arguments), environment, command.line))
        return None

    def _declare(self, command: Simple) -> None:
        for word in command.words[1:]:
            if isinstance(word, ArrayValue):
                self._assign(word)
            elif isinstance(first := word.parts[0], Text) and (match := re.match(r"([A-Za-z_]\w*)(\+?)=", first.text)):
                value = Word((Text(first.text[match.end() :], first.quoted), *word.parts[1:]), word.line)
                self._assign(Assignment(match[1], bool(match[2]), value))

    def _assign(self, assignment: Assignment | ArrayValue) -> None:
        values, name = self.variables.values, assignment.name
        before = values.get(name)
        if isinstance(assignment, ArrayValue):
            items = [text for word in assignment.words for text in self._expanded(word)]
            old = [before] if isinstance(before, str) else before or []
            values[name] = [*old, *items] if assignment.append else items
            return
        try:
            text = self.variables.text(assignment.value)
        except ValueError as error:
            self.trace.troubles.append(Trouble(assignment.value.line, str(error)))
            text = mark(name)
        if any(text == mark(undecided) for undecided in UNDECIDED):
            text = mark(name)
        if isinstance(before, list) and assignment.append:
            values[name] = [*before[:1], text] if not before else [before[0] + text, *before[1:]]
        else:
            values[name] = f"{before or ''}{text}" if assignment.append else text

    def _call(self, words: list[str]) -> bool | None:
        outer = self.variables.arguments
        self.variables.arguments = words[1:]
        try:
            return self._nested(self.functions[words[0]])
        except _Exit:
            return True
        finally:
            self.variables.arguments = outer

    def _again(self, source: str, line: int) -> bool | None:
        return self._nested(parse(source, line))

    def _nested(self, body: Body) -> bool | None:
        if self._depth >= _DEPTH:
            return None
        self._depth += 1
        try:
            return self.body(body)
        finally:
            self._depth -= 1


def _only_command(body: Body) -> Simple | None:
    """The command of a body that consists of one, in braces or not."""
    if len(body.commands) != 1:
        return None
    (_, command) = body.commands[0]
    return (
        _only_command(command.body) if isinstance(command, Group) else command if isinstance(command, Simple) else None
    )


def _script_word(words: list[str]) -> int | None:
    """The place of a script given as text: ``bash -c 'script'``."""
    for at, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] in _SHELLS:
            option = next((i for i in range(at + 1, len(words) - 1) if re.fullmatch(r"-[a-z]*c", words[i])), None)
            return option + 1 if option is not None else None
    return None


def is_setting(text: str) -> bool:
    """Tell whether a word reads like ``block.key=value``, with or without one of Hydra's prefixes."""
    return _SETTING.match(text) is not None


def _contains_settings(command: Command) -> bool:
    """Tell whether somewhere in a command stands what a training run is given."""
    match command:
        case Simple(assignments, words, _):
            texts = [
                part.text for word in words if isinstance(word, Word) for part in word.parts if isinstance(part, Text)
            ]
            return bool(assignments) or any(is_setting(text) for text in texts)
        case If(branches, otherwise, _):
            bodies = [body for _, body in branches] + [otherwise]
        case For(_, _, body, _) | While(body, _) | Group(body, _) | Function(_, body, _):
            bodies = [body]
        case Case(_, arms, _):
            bodies = [body for _, body in arms]
    return any(_contains_settings(inner) for body in bodies for _, inner in body.commands)
