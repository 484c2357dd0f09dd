"""What a shell would put in place of a word, as far as the script itself says; nothing is executed.

What only the machine knows (a variable that the script does not set, the output of a program) stays open: it is kept as a
mark inside the text, which :func:`opened` turns into an interpolation that reads the environment variable of that name.
"""

from __future__ import annotations

import ast
import datetime
import fnmatch
import operator
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hone.config.launch.lexer import Lexer
from hone.config.launch.words import Arithmetic, Parameter, Part, ShellSyntaxError, Substitution, Text, Word

_MARK = re.compile("\ue000([^\ue001]*)\ue001")
ALWAYS_SET = ("HOME", "USER")
UNDECIDED = ("OUTPUT", "ARGUMENTS")
"""Marks of what is no variable: a program's output, the number of arguments."""

_ARITHMETIC: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),
    ast.FloorDiv: lambda a, b: int(a / b),
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Gt: lambda a, b: int(a > b),
    ast.Lt: lambda a, b: int(a < b),
    ast.GtE: lambda a, b: int(a >= b),
    ast.LtE: lambda a, b: int(a <= b),
    ast.Eq: lambda a, b: int(a == b),
    ast.NotEq: lambda a, b: int(a != b),
}


def mark(name: str) -> str:
    """Text that stands for a value which the script does not tell."""
    return f"\ue000{name}\ue001"


def is_open(text: str) -> bool:
    """Tell whether a text holds something that the script does not tell."""
    return "\ue000" in text


def open_names(text: str) -> list[str]:
    """The names that a text leaves open."""
    return _MARK.findall(text)


def opened(text: str) -> str:
    """The text with each open value read from the environment, and its name where the environment has none.

    >>> opened(f"{mark('DATA')}/train.parquet")
    '${oc.env:DATA,DATA}/train.parquet'
    """
    return _MARK.sub(lambda m: f"${{oc.env:{m[1]}}}" if m[1] in ALWAYS_SET else f"${{oc.env:{m[1]},{m[1]}}}", text)


_HEREDOC = re.compile(
    r"cat\s*<<-?\s*(?P<quote>['\"]?)(?P<end>\w+)(?P=quote)\s*\n(?P<text>.*?)\n?\s*(?P=end)", re.DOTALL
)


def shown(text: str) -> str:
    """The text with each open value as a shell script writes it.

    >>> shown(f"{mark('DATA')}/train.parquet")
    '$DATA/train.parquet'
    """
    return _MARK.sub(lambda m: "$(...)" if m[1] in UNDECIDED else f"${m[1]}", text)


@dataclass
class Variables:
    """What the script has set so far.

    Args:
        directory: of the script, as text.
    """

    directory: str = "."
    values: dict[str, str | list[str]] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)
    printers: dict[str, tuple[Word, ...]] = field(default_factory=dict)
    """Functions of a single command, and its words: such a function prints what the command prints."""

    def expand(self, word: Word) -> list[str]:
        """The words that ``word`` becomes: none, one, or several."""
        fields: list[str] = []
        current: str | None = None
        for part in word.parts:
            pieces, splits = self._pieces(part)
            if isinstance(part, Text) and part.text == "" and not part.quoted:
                continue
            if splits:
                pieces = _split(pieces)
                if not pieces:
                    continue
            elif not pieces:
                continue
            fields += [(current or "") + pieces[0], *pieces[1:]][:-1]
            current = pieces[-1] if len(pieces) > 1 else (current or "") + pieces[0]
        return fields if current is None else [*fields, current]

    def text(self, word: Word) -> str:
        """The word as the value of a variable: not split."""
        text = "".join(" ".join(self._pieces(part)[0]) for part in word.parts)
        return mark("HOME") + text[1:] if text == "~" or text.startswith("~/") else text

    def of(self, source: str) -> str:
        """Expand a text such as the default in ``${name:-default}``."""
        if not source:
            return ""
        lexer = Lexer(f'"{source}"' if not re.search(r"[\"']", source) else source)
        words = [token for token in lexer.tokens() if isinstance(token, Word)]
        return " ".join(self.text(word) for word in words)

    def _pieces(self, part: Part) -> tuple[list[str], bool]:
        """The texts that a part becomes, and whether they are split at blanks."""
        if isinstance(part, Text):
            return [part.text], False
        if isinstance(part, Arithmetic):
            return [self.arithmetic(part.expression)], False
        if isinstance(part, Substitution):
            return [self.output(part.command)], not part.quoted
        return self._parameter(part)

    def _parameter(self, part: Parameter) -> tuple[list[str], bool]:
        if part.name in ("@", "*") and part.operator in ("", ":"):
            given = self.arguments
            if part.operator:
                given = _slice([f"{self.directory}/script.sh", *given], self.of(part.argument))
            return given if part.quoted else [" ".join(given)], not part.quoted
        value = self._value(part)
        if isinstance(value, list):
            if part.operator == "length":
                return [str(len(value))], False
            whole = part.index in ("@", "*")
            if whole and part.operator == ":":
                return _slice(value, self.of(part.argument)), not part.quoted and not whole
            items = [self._apply(part, item) for item in (value if whole else value[:1])]
            if part.quoted and part.index == "*":
                items = [" ".join(items)]
            return items, not part.quoted and not whole
        return [self._apply(part, value)], not part.quoted

    def _value(self, part: Parameter) -> str | list[str] | None:
        if part.name.isdigit():
            position = int(part.name)
            if position == 0:
                return f"{self.directory}/script.sh"
            return self.arguments[position - 1] if position <= len(self.arguments) else None
        if part.name == "#":
            return str(len(self.arguments)) if self.arguments else mark("ARGUMENTS")
        if part.name == "BASH_SOURCE":
            return f"{self.directory}/script.sh"
        if part.name in ("$", "!", "?", "-"):
            return "0"
        value = self.values.get(part.name)
        if isinstance(value, list) and part.index.isdigit():
            return value[int(part.index)] if int(part.index) < len(value) else None
        return value

    def _apply(self, part: Parameter, value: str | None) -> str:
        operator_, argument = part.operator, part.argument
        unset = value is None or (value == "" and operator_.startswith(":"))
        if operator_ in (":-", "-", ":=", "="):
            result = self.of(argument) if unset else str(value)
            if "=" in operator_ and unset:
                self.values[part.name] = result
            return result
        if operator_ in (":+", "+"):
            return "" if unset else self.of(argument)
        if value is None:
            return mark(f"ARG{part.name}" if part.name.isdigit() else part.name)
        if operator_ == "indirect":
            target = self.values.get(value)
            return target if isinstance(target, str) else mark(value)
        if operator_ == "length":
            return str(len(value))
        return _edited(value, operator_, self.of(argument))

    def arithmetic(self, expression: str) -> str:
        """The value of an arithmetic expression, marked as open when it depends on something open."""
        plain = re.sub(r"\$\{?(\w+)\}?", r"\1", expression)
        names = sorted(set(re.findall(r"[A-Za-z_]\w*", plain)))
        for name in names:
            value = self.values.get(name)
            if not isinstance(value, str) or is_open(value):
                return mark(name)
            plain = re.sub(rf"\b{name}\b", f"({value.strip()})", plain)
        try:
            return str(_calculate(ast.parse(plain.strip().replace("/", "//").replace("////", "//"), mode="eval").body))
        except (SyntaxError, KeyError, TypeError, ZeroDivisionError) as error:
            raise ValueError(f"$(({expression})) cannot be calculated") from error

    def output(self, command: str) -> str:
        """What a command would print, for the few whose output the script determines; otherwise open."""
        written = _HEREDOC.fullmatch(command.strip())
        if written is not None:
            return written["text"] if written["quote"] else self.of(written["text"].replace('"', '\\"'))
        try:
            words = [
                text for token in Lexer(command).tokens() if isinstance(token, Word) for text in self.expand(token)
            ]
        except (ShellSyntaxError, ValueError):
            return mark("OUTPUT")
        if len(words) == 1 and words[0] in self.printers:
            words = [text for word in self.printers[words[0]] for text in self.expand(word)]
        if not words and not re.search(r"[|<]", command):
            return ""  # nothing but a comment
        return mark("OUTPUT") if "|" in command else _printed(words)


def _printed(words: list[str]) -> str:
    """What ``words`` would print, when they alone determine it."""
    match words:
        case ["date", *arguments]:
            pattern = next((a[1:] for a in arguments if a.startswith("+")), "%c")
            return datetime.datetime.now().strftime(pattern.replace("%s", "%Y%m%d%H%M%S"))
        case ["pwd"]:
            return "."
        case ["cd", path, *_]:
            return posixpath.normpath(path)
        case ["dirname", *_]:
            return posixpath.dirname(words[-1]) or "."
        case ["basename", path, *suffix]:
            name = posixpath.basename(path)
            return name.removesuffix(suffix[0]) if suffix else name
        case ["realpath" | "readlink" | "echo", *rest]:
            return " ".join(word for word in rest if not re.fullmatch(r"-[a-z]+", word))
    return mark("OUTPUT")


def _slice(whole: list[str], bounds: str) -> list[str]:
    """``${list[@]:offset:length}``; all of it where the bounds are not plain numbers."""
    found = re.fullmatch(r"\s*(-?\d+)\s*(?::\s*(-?\d+)\s*)?", bounds)
    if found is None:
        return whole
    offset = int(found[1])
    rest = whole[offset:]
    if found[2] is None:
        return rest
    return rest[: int(found[2])] if int(found[2]) >= 0 else rest[: len(rest) + int(found[2])]


def _split(pieces: list[str]) -> list[str]:
    return [word for piece in pieces for word in piece.split()]


def _edited(value: str, how: str, argument: str) -> str:
    """``${name#pattern}`` and its kin."""
    if not how or is_open(value):
        return value
    if how == ":":
        return "".join(_slice(list(value), argument))
    if how in ("#", "##"):
        ends = range(len(value) + 1) if how == "#" else range(len(value), -1, -1)
        return next((value[end:] for end in ends if fnmatch.fnmatchcase(value[:end], argument)), value)
    if how in ("%", "%%"):
        starts = range(len(value), -1, -1) if how == "%" else range(len(value) + 1)
        return next((value[:start] for start in starts if fnmatch.fnmatchcase(value[start:], argument)), value)
    if how.startswith("/"):
        old, _, new = argument.partition("/")
        return value.replace(old, new, -1 if how == "//" else 1)
    return value.upper() if how.startswith("^") else value.lower()


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _ARITHMETIC[type(node.op)](_calculate(node.left), _calculate(node.right))
    if isinstance(node, ast.UnaryOp):
        return _ARITHMETIC[type(node.op)](_calculate(node.operand))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _ARITHMETIC[type(node.ops[0])](_calculate(node.left), _calculate(node.comparators[0]))
    if isinstance(node, ast.IfExp):
        return _calculate(node.body if _calculate(node.test) else node.orelse)
    raise TypeError(ast.dump(node))
