"""Words of a shell script, as they are written: literal text and what a shell would put in its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """Literal text; ``quoted`` keeps it from being split and from being a keyword."""

    text: str
    quoted: bool = False


@dataclass(frozen=True)
class Parameter:
    """``$name``, ``${name}``, or ``${name<operator>argument}``; ``index`` is that of ``${name[index]}``. The operators before
    the name are called ``length`` (``${#name}``) and ``indirect`` (``${!name}``)."""

    name: str
    operator: str = ""
    argument: str = ""
    index: str = ""
    quoted: bool = False


@dataclass(frozen=True)
class Substitution:
    """``$(command)`` or its older spelling in backquotes."""

    command: str
    quoted: bool = False


@dataclass(frozen=True)
class Arithmetic:
    """``$((expression))``."""

    expression: str
    quoted: bool = False


Part = Text | Parameter | Substitution | Arithmetic


@dataclass(frozen=True)
class Word:
    """Parts without space between them, and the line that they begin on."""

    parts: tuple[Part, ...]
    line: int

    @property
    def literal(self) -> str | None:
        """The word when it is plain, unquoted text, else None: only such a word can be a keyword."""
        if all(isinstance(part, Text) and not part.quoted for part in self.parts):
            return "".join(part.text for part in self.parts if isinstance(part, Text))
        return None


@dataclass(frozen=True)
class ArrayValue:
    """``name=(words)`` or ``name+=(words)``."""

    name: str
    append: bool
    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True)
class Operator:
    """``;``, ``&&``, ``|``, a line's end, ``(``, ..."""

    text: str
    line: int


Token = Word | ArrayValue | Operator


class ShellSyntaxError(ValueError):
    """The script ends inside a quote, a bracket or a compound command, or a word stands where none can.

    Args:
        what: what is wrong.
        line: where it begins.
    """

    def __init__(self, what: str, line: int) -> None:
        super().__init__(f"line {line}: {what}")
        self.what, self.line = what, line
