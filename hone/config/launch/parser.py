"""From words and operators to commands: simple ones, and those that are chosen, repeated or named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hone.config.launch.lexer import Lexer
from hone.config.launch.words import ArrayValue, Operator, ShellSyntaxError, Text, Token, Word

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_SEPARATORS = ("\n", ";", "&")
_CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
_CONNECTORS = ("&&", "||", "|", "|&")


@dataclass(frozen=True)
class Assignment:
    """``name=value`` before a command, or alone."""

    name: str
    append: bool
    value: Word


@dataclass(frozen=True)
class Simple:
    """Assignments, then words: the program and its arguments."""

    assignments: tuple[Assignment | ArrayValue, ...]
    words: tuple[Word | ArrayValue, ...]
    line: int


@dataclass(frozen=True)
class If:
    """Conditions with what follows each, and what is done when none holds."""

    branches: tuple[tuple[Body, Body], ...]
    otherwise: Body
    line: int


@dataclass(frozen=True)
class For:
    """``for name in words; do body; done``."""

    name: str
    words: tuple[Word, ...]
    body: Body
    line: int


@dataclass(frozen=True)
class While:
    """``while`` or ``until``."""

    body: Body
    line: int


@dataclass(frozen=True)
class Case:
    """``case word in pattern) body;; esac``."""

    word: Word
    arms: tuple[tuple[tuple[Word, ...], Body], ...]
    line: int


@dataclass(frozen=True)
class Function:
    """``name() { body; }``."""

    name: str
    body: Body
    line: int


@dataclass(frozen=True)
class Group:
    """``{ body; }`` or ``( body )``."""

    body: Body
    line: int


Command = Simple | If | For | While | Case | Function | Group


@dataclass(frozen=True)
class Body:
    """Commands in their order, each with the connector before it (``&&``, ``||``, ``|``, or nothing)."""

    commands: tuple[tuple[str, Command], ...] = field(default=())


def parse(source: str, line: int = 1) -> Body:
    """Parse a script.

    Raises:
        ShellSyntaxError: it is not a shell script.
    """
    parser = _Parser(Lexer(source, line).tokens())
    body = parser.body(())
    if parser.token is not None:
        raise ShellSyntaxError("a closing word without its beginning", parser.token.line)
    return body


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at = tokens, 0

    @property
    def token(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def body(self, ends: tuple[str, ...]) -> Body:
        """Commands up to one of the words or operators ``ends``, which is left to be read."""
        commands: list[tuple[str, Command]] = []
        connector = ""
        while (token := self.token) is not None and not self._is(*ends):
            if isinstance(token, Operator) and token.text in _SEPARATORS:
                self.at += 1
                connector = "" if token.text != "\n" else connector
            elif isinstance(token, Operator) and token.text in _CONNECTORS:
                self.at += 1
                connector = token.text
            else:
                commands.append((connector, self._command()))
                connector = ""
        if self.token is None and ends:
            raise ShellSyntaxError(f"'{ends[0]}' is missing", self.tokens[-1].line if self.tokens else 0)
        return Body(tuple(commands))

    def _is(self, *texts: str) -> bool:
        return _text(self.token) in texts

    def _expect(self, text: str) -> None:
        if not self._is(text):
            line = self.token.line if self.token else self.tokens[-1].line
            raise ShellSyntaxError(f"'{text}' is missing", line)
        self.at += 1

    def _command(self) -> Command:
        token = self.token
        assert token is not None
        text, line = _text(token), token.line
        if text == "if":
            return self._if(line)
        if text in ("for", "select"):
            return self._for(line)
        if text in ("while", "until"):
            self.at += 1
            self.body(("do",))
            return While(self._do(), line)
        if text == "case":
            return self._case(line)
        if text in ("{", "("):
            self.at += 1
            closing = "}" if text == "{" else ")"
            body = self.body((closing,))
            self._expect(closing)
            return Group(body, line)
        if text == "function" or self._is_definition():
            return self._function(line)
        if isinstance(token, Operator) or text in _CLOSING:
            raise ShellSyntaxError(f"'{text}' where a command is expected", line)
        return self._simple(line)

    def _is_definition(self) -> bool:
        following = self.tokens[self.at + 1 : self.at + 3]
        return isinstance(self.token, Word) and [_text(item) for item in following] == ["(", ")"]

    def _function(self, line: int) -> Function:
        if self._is("function"):
            self.at += 1
        name = _text(self.token)
        self.at += 1
        while self._is("(", ")", "\n"):
            self.at += 1
        return Function(name, Body((("", self._command()),)), line)

    def _if(self, line: int) -> If:
        branches = []
        while self._is("if", "elif"):
            self.at += 1
            condition = self.body(("then",))
            self.at += 1
            branches.append((condition, self.body(("elif", "else", "fi"))))
        otherwise = Body()
        if self._is("else"):
            self.at += 1
            otherwise = self.body(("fi",))
        self._expect("fi")
        return If(tuple(branches), otherwise, line)

    def _for(self, line: int) -> For:
        self.at += 1
        name, words = _text(self.token), []
        self.at += 1
        if self._is("in"):
            self.at += 1
            while isinstance(self.token, Word):
                words.append(self.token)
                self.at += 1
        while self._is(*_SEPARATORS):
            self.at += 1
        return For(name, tuple(words), self._do(), line)

    def _do(self) -> Body:
        self._expect("do")
        body = self.body(("done",))
        self.at += 1
        return body

    def _case(self, line: int) -> Case:
        self.at += 1
        word = self.token
        if not isinstance(word, Word):
            raise ShellSyntaxError("'case' without a word", line)
        self.at += 1
        arms = []
        self._skip_lines()
        self._expect("in")
        self._skip_lines()
        while not self._is("esac"):
            patterns = []
            while not self._is(")"):
                if self.token is None:
                    raise ShellSyntaxError("'esac' is missing", line)
                if isinstance(self.token, Word):
                    patterns.append(self.token)
                self.at += 1
            self.at += 1
            arms.append((tuple(patterns), self.body((";;", ";&", ";;&", "esac"))))
            if not self._is("esac"):
                self.at += 1
            self._skip_lines()
        self.at += 1
        return Case(word, tuple(arms), line)

    def _skip_lines(self) -> None:
        while self._is("\n"):
            self.at += 1

    def _simple(self, line: int) -> Simple:
        assignments: list[Assignment | ArrayValue] = []
        words: list[Word | ArrayValue] = []
        if self._is("[["):
            return Simple((), tuple(self._condition()), line)
        while isinstance(token := self.token, Word | ArrayValue):
            found = _assignment(token) if not words else None
            if found is not None:
                assignments.append(found)
            else:
                words.append(token)
            self.at += 1
        return Simple(tuple(assignments), tuple(words), line)

    def _condition(self) -> list[Word]:
        """The words from ``[[`` to ``]]``, with the operators between them as words."""
        words: list[Word] = []
        while not self._is("]]"):
            token = self.token
            if token is None:
                raise ShellSyntaxError("']]' is missing", words[0].line)
            if not isinstance(token, ArrayValue):
                words.append(token if isinstance(token, Word) else Word((Text(token.text),), token.line))
            self.at += 1
        self.at += 1
        return words


def _text(token: Token | None) -> str:
    if isinstance(token, Word):
        return token.literal or ""
    return token.text if isinstance(token, Operator) else ""


def _assignment(token: Word | ArrayValue) -> Assignment | ArrayValue | None:
    if isinstance(token, ArrayValue):
        return token
    first = token.parts[0] if token.parts else None
    match = _ASSIGNMENT.match(first.text) if isinstance(first, Text) and not first.quoted else None
    if not match or not isinstance(first, Text):
        return None
    rest = Text(first.text[match.end() :])
    return Assignment(match[1], bool(match[2]), Word((rest, *token.parts[1:]), token.line))
