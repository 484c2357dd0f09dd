"""From a shell script's text to its words and operators; nothing is expanded or executed."""

from __future__ import annotations

import re

from hone.config.launch.words import (
    Arithmetic,
    ArrayValue,
    Operator,
    Parameter,
    Part,
    ShellSyntaxError,
    Substitution,
    Text,
    Token,
    Word,
)

_OPERATORS = (";;&", ";;", ";&", "&&", "||", "|&", ";", "|", "&", "(", ")", "\n")
_REDIRECTION = re.compile(r"(\d*|&)(<<<|<<-|<<|<>|<&|>>|>&|>\||<|>)")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=\(")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
_BRACED = re.compile(r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?$!-])(?:\[([^\]]*)\])?(.*)", re.S)
_ENDS_WORD = " \t\n;|&()<>"


class Lexer:
    """Reads tokens one after another.

    Args:
        source: the script.
        line: number of its first line.
    """

    def __init__(self, source: str, line: int = 1) -> None:
        self.source, self.at, self._first = source.replace("\r\n", "\n"), 0, line
        self._heredocs: list[tuple[str, bool]] = []

    def tokens(self) -> list[Token]:
        """All tokens of the script."""
        found: list[Token] = []
        while (token := self._next()) is not None:
            found.append(token)
        return found

    @property
    def line(self) -> int:
        """The number of the line that is being read."""
        return self._first + self.source.count("\n", 0, self.at)

    def _next(self) -> Token | None:
        while True:
            self._skip_blanks()
            if self.at >= len(self.source):
                return None
            redirection = _REDIRECTION.match(self.source, self.at)
            if not redirection:
                break
            self._redirect(redirection)
        line = self.line
        for text in _OPERATORS:
            if self.source.startswith(text, self.at):
                if text == "(" and self.source.startswith("((", self.at):
                    return self._arithmetic_command(line)
                self.at += len(text)
                if text == "\n":
                    self._skip_heredocs()
                return Operator(text, line)
        array = _ARRAY.match(self.source, self.at)
        if array:
            self.at = array.end()
            return ArrayValue(array[1], bool(array[2]), tuple(self._array_words(line)), line)
        return self.word()

    def _skip_blanks(self) -> None:
        while self.at < len(self.source):
            if self.source[self.at] in " \t":
                self.at += 1
            elif self.source.startswith("\\\n", self.at):
                self.at += 2
            elif self.source[self.at] == "#":
                end = self.source.find("\n", self.at)
                self.at = len(self.source) if end < 0 else end
            else:
                return

    def _redirect(self, match: re.Match[str]) -> None:
        """Leave out a redirection and its target; a here-document's text follows at the line's end."""
        self.at = match.end()
        self._skip_blanks()
        line = self.line
        if match[2] in ("<<", "<<-"):
            delimiter = "".join(part.text for part in self.word().parts if isinstance(part, Text))
            self._heredocs.append((delimiter, match[2] == "<<-"))
        elif self.at >= len(self.source) or self.source[self.at] == "\n":
            raise ShellSyntaxError(f"'{match[0]}' has no target", line)
        elif self.source.startswith("(", self.at):
            self.at += 1
            self._balanced("(", ")")
        else:
            self.word()

    def _skip_heredocs(self) -> None:
        for delimiter, indented in self._heredocs:
            while self.at < len(self.source):
                end = self.source.find("\n", self.at)
                text = self.source[self.at : end if end >= 0 else len(self.source)]
                self.at = len(self.source) if end < 0 else end + 1
                if (text.lstrip("\t") if indented else text) == delimiter:
                    break
        self._heredocs.clear()

    def _array_words(self, line: int) -> list[Word]:
        words = []
        while True:
            self._skip_blanks()
            if self.at >= len(self.source):
                raise ShellSyntaxError("the array has no ')'", line)
            if self.source[self.at] == "\n":
                self.at += 1
            elif self.source[self.at] == ")":
                self.at += 1
                return words
            elif self.source[self.at] in _ENDS_WORD:
                raise ShellSyntaxError(f"'{self.source[self.at]}' in an array", self.line)
            else:
                words.append(self.word())

    def _arithmetic_command(self, line: int) -> Word:
        self.at += 2
        return Word((Text("(("), Arithmetic(self._balanced("(", ")", closing=2))), line)

    def word(self) -> Word:
        """One word, from here to the next blank or operator outside quotes."""
        parts: list[Part] = []
        line = self.line
        while self.at < len(self.source) and self.source[self.at] not in _ENDS_WORD:
            parts += self._part()
        return Word(_joined(parts), line)

    def _part(self) -> list[Part]:
        character = self.source[self.at]
        if character == "'":
            return [Text(self._until("'"), quoted=True)]
        if self.source.startswith("$'", self.at):
            self.at += 1
            return [Text(self._until("'").replace("\\n", "\n").replace("\\t", "\t"), quoted=True)]
        if character == '"' or self.source.startswith('$"', self.at):
            self.at += character == "$"
            return self._double_quoted()
        if character == "\\":
            self.at += 2
            escaped = self.source[self.at - 1 : self.at]
            return [] if escaped == "\n" else [Text(escaped, quoted=True)]
        if character in "$`":
            return [self._expansion(quoted=False)]
        self.at += 1
        return [Text(character)]

    def _until(self, quote: str) -> str:
        line, start = self.line, self.at + 1
        end = self.source.find(quote, start)
        if end < 0:
            raise ShellSyntaxError(f"the quote {quote} is not closed", line)
        self.at = end + 1
        return self.source[start:end]

    def _double_quoted(self) -> list[Part]:
        line, parts = self.line, [Text("", quoted=True)]
        self.at += 1
        while self.at < len(self.source):
            character = self.source[self.at]
            if character == '"':
                self.at += 1
                return list(parts)
            if character == "\\" and self.source[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                escaped = self.source[self.at + 1]
                parts.append(Text("" if escaped == "\n" else escaped, quoted=True))
                self.at += 2
            elif character in "$`":
                parts.append(self._expansion(quoted=True))  # type: ignore[arg-type]
            else:
                parts.append(Text(character, quoted=True))
                self.at += 1
        raise ShellSyntaxError('the quote " is not closed', line)

    def _expansion(self, *, quoted: bool) -> Part:
        if self.source[self.at] == "`":
            return Substitution(self._until("`"), quoted)
        self.at += 1
        if self.source.startswith("((", self.at):
            self.at += 2
            return Arithmetic(self._balanced("(", ")", closing=2), quoted)
        if self.source.startswith("(", self.at):
            self.at += 1
            return Substitution(self._balanced("(", ")"), quoted)
        if self.source.startswith("{", self.at):
            self.at += 1
            return _braced(self._balanced("{", "}"), quoted, self.line)
        name = _NAME.match(self.source, self.at)
        if not name:
            return Text("$", quoted)
        self.at = name.end()
        return Parameter(name[0], quoted=quoted)

    def _balanced(self, opening: str, closing_character: str, closing: int = 1) -> str:
        """The text up to the bracket that closes ``closing`` levels; quotes inside are respected."""
        start, line, depth = self.at, self.line, closing
        while self.at < len(self.source):
            character = self.source[self.at]
            if character in "'\"" and opening == "(" and closing == 1:
                self._skip_quoted(character)
                continue
            self.at += 2 if character == "\\" else 1
            depth += (character == opening) - (character == closing_character)
            if depth == 0:
                return self.source[start : self.at - closing]
        raise ShellSyntaxError(f"'{opening * closing}' is not closed", line)

    def _skip_quoted(self, quote: str) -> None:
        if quote == "'":
            self._until("'")
        else:
            self._double_quoted()


def _braced(body: str, quoted: bool, line: int) -> Parameter:
    match = _BRACED.fullmatch(body)
    if not match:
        raise ShellSyntaxError(f"'${{{body}}}' cannot be read", line)
    prefix, name, index, rest = match.groups()
    if prefix:
        return Parameter(name, {"#": "length", "!": "indirect"}[prefix], "", index or "", quoted)
    operator = re.match(r":[-=?+]|[-=?+]|##?|%%?|//?[#%]?|\^\^?|,,?|:", rest)
    if rest and not operator:
        raise ShellSyntaxError(f"'${{{body}}}' cannot be read", line)
    found = operator[0] if operator else ""
    return Parameter(name, found, rest[len(found) :], index or "", quoted)


def _joined(parts: list[Part]) -> tuple[Part, ...]:
    """Put neighbouring texts of one kind together."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text) and part.quoted == last.quoted:
            joined[-1] = Text(last.text + part.text, part.quoted)
        else:
            joined.append(part)
    return tuple(joined)
