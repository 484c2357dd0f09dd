"""Expansion of shell words whose value the script determines; nothing is executed."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tree_sitter import Node

from hone.apps.verl.launch.grammar import between, is_arithmetic, parse, text_of
from hone.apps.verl.launch.words import is_open, mark, open_names

Part = tuple[list[str], bool]
"""Texts that a part of a word becomes, and whether they are split at blanks."""
_TOO_LARGE = 2**63
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "**": lambda a, b: a**b if abs(a) < 2 or b < 64 else _TOO_LARGE,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b),
}


_MOST_TEXT, _MOST_EDITED = 2**20, 2**14
"""Characters that all expansions of a script may have together, and those of a value that is edited by a pattern."""


class _OpenNumber(Exception):
    """Arithmetic depends on a value that the script does not set."""


@dataclass
class Variables:
    """Variables that the script has set so far."""

    directory: str  # directory of the script, as text
    output: Callable[[Node], str]  # returns the output of a command substitution
    values: dict[str, str | list[str]] = field(default_factory=dict)  # variables; a list is an array
    arguments: list[str] = field(default_factory=list)  # the positional parameters
    _room: int = _MOST_TEXT

    def fields(self, word: Iterable[Node]) -> list[str]:
        """Return the words that a word, given by its parts, becomes: none, one, or several."""
        fields: list[str] = []
        current: str | None = None
        for texts, splits in (part for node in word for part in self._parts(node)):
            pieces = [piece for text in texts for piece in text.split()] if splits else texts
            if not pieces:
                continue
            fields += [(current or "") + pieces[0], *pieces[1:]][:-1]
            current = pieces[-1] if len(pieces) > 1 else (current or "") + pieces[0]
        return fields if current is None else [*fields, current]

    def text(self, word: Node | None) -> str:
        """Return the word as the value of a variable: not split."""
        return _joined(self._parts(word)) if word is not None else ""

    def arithmetic(self, node: Node) -> str:
        """Return the value of ``$((...))`` or ``((...))``, as a mark when it depends on something open."""
        try:
            return str(int(self._number(node.named_children[-1])))
        except _OpenNumber as name:
            return mark(str(name))
        except (ValueError, KeyError, IndexError, ZeroDivisionError) as error:
            raise ValueError(f"{text_of(node).strip()} cannot be calculated") from error

    def _parts(self, node: Node, quoted: bool = False) -> list[Part]:
        text = text_of(node)
        match node.type:
            case "string":
                first, last = node.children[0], node.children[-1]
                return self._within(node, first.end_byte, last.start_byte, quoted=True) or [([""], False)]
            case "heredoc_body":
                return self._within(node, node.start_byte, node.end_byte, quoted=True)
            case "raw_string":
                return [([text[1:-1]], False)]
            case "ansi_c_string":
                return [([text[2:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")], False)]
            case "concatenation":
                return self._within(node, node.start_byte, node.end_byte, quoted=quoted)
            case "simple_expansion" | "expansion":
                return self._charged(self._parameter(node, quoted))
            case "command_substitution" if is_arithmetic(node):
                return self._parts(parse(f": {text}").children[0].children[-1], quoted)
            case "command_substitution":
                return [([self.output(node)], not quoted)]
            case "arithmetic_expansion":
                return [([self.arithmetic(node)], False)]
            case "process_substitution":
                return [([mark("OUTPUT")], False)]
            case "regex" | "extglob_pattern" if "$" in text:
                return self._parts(parse(f': "{text}"').children[0].children[-1], True)
        if node.type == "word" and not quoted and (text == "~" or text.startswith("~/")):
            text = mark("HOME") + text[1:]
        return _literal(text, quoted)

    def _within(self, node: Node, start: int, end: int, *, quoted: bool) -> list[Part]:
        segments = between(node, start, end)
        return [
            part
            for piece in segments
            for part in (_literal(piece, quoted) if isinstance(piece, str) else self._parts(piece, quoted))
        ]

    def _charged(self, parts: list[Part]) -> list[Part]:
        """Count the characters and words that variables became so far: ``X=$X$X`` doubles them in each round of a loop."""
        self._room -= sum(len(text) + 8 for texts, _ in parts for text in texts)
        if self._room < 0:
            raise ValueError(f"the script's variables become more than {_MOST_TEXT} characters")
        return parts

    def _parameter(self, node: Node, quoted: bool) -> list[Part]:
        inner = node.children[1:-1] if node.type == "expansion" else node.children[1:]
        before = inner.pop(0).type if len(inner) > 1 and not inner[0].is_named else ""
        target = inner.pop(0)
        index = text_of(target.child_by_field_name("index")) if target.type == "subscript" else ""
        name = text_of(target.child_by_field_name("name") if target.type == "subscript" else target)
        how = inner[0].type if inner else ""
        rest = self._within(node, inner[0].end_byte, node.end_byte - 1, quoted=quoted) if inner else []
        whole = name in ("@", "*") or index in ("@", "*")
        value = self._value(name, index)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if before == "#":
            return [([str(len(items) if whole else len("".join(items[:1])))], False)] if items else _open(name)
        if not whole:
            items = items[:1]
        unset = not items or (how.startswith(":") and items == [""])
        if how in (":+", "+"):
            return [] if unset else rest
        if how in (":-", "-", ":=", "=") and unset:
            if "=" in how:
                self.values[name] = _joined(rest)
            return rest or [([""], not quoted)]
        if whole:
            if how == ":":
                items = _slice([f"{self.directory}/script.sh", *items] if name == "@" else items, _joined(rest))
            else:
                items = [_edited(item, how, _joined(rest)) for item in items]
            return [([" ".join(items)] if quoted and "*" in (name, index) else items, not quoted)]
        if not items:
            return _open(name)
        if before == "!":
            items = [str(self.values.get(items[0], mark(items[0])))]
        return [([_edited(items[0], how, _joined(rest))], not quoted)]

    def _value(self, name: str, index: str) -> str | list[str] | None:
        if name in ("@", "*"):
            return self.arguments
        if name.isdigit() and name != "0":
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else None
        if name in ("0", "BASH_SOURCE"):
            return f"{self.directory}/script.sh"
        if name == "#":
            return str(len(self.arguments)) if self.arguments else mark("ARGUMENTS")
        if name in ("$", "!", "?", "-"):
            return "0"
        value = self.values.get(name)
        if isinstance(value, list) and index.lstrip("-").isdigit():
            return value[int(index)] if -len(value) <= int(index) < len(value) else None
        return value

    def _number(self, node: Node) -> int:
        match node.type:
            case "parenthesized_expression":
                return self._number(node.named_children[0])
            case "binary_expression":
                left, how, right = node.children
                value = _OPERATIONS[how.type](self._number(left), self._number(right))
                if abs(value) >= _TOO_LARGE:
                    raise ValueError("the number has more than 64 bits")
                return value
            case "unary_expression":
                value = self._number(node.children[1])
                return {"-": -value, "+": value, "!": int(not value)}[node.children[0].type]
            case "ternary_expression":
                condition, yes, no = node.named_children
                return self._number(yes if self._number(condition) else no)
            case "variable_name" | "word":
                value = self.values.get(text_of(node))
                text = value if isinstance(value, str) else mark(text_of(node))
            case _:
                text = self.text(node)
        if is_open(text):
            raise _OpenNumber(text_of(node) if node.type in ("variable_name", "word") else open_names(text)[0])
        return int(text, 0)


def _open(name: str) -> list[Part]:
    return [([mark(f"ARG{name}" if name.isdigit() else name)], False)]


def _joined(parts: Iterable[Part]) -> str:
    return "".join(" ".join(texts) for texts, _ in parts)


def _literal(text: str, quoted: bool) -> list[Part]:
    """Return the literal text of a word, without its backslashes."""
    text = re.sub(r"\\([\\\"$`\n])" if quoted else r"\\(.|\n)", lambda m: m[1].strip("\n"), text)
    return [([text], False)] if text else []


def _slice(whole: list[str], bounds: str) -> list[str]:
    """Return ``${list[@]:offset:length}``, or the whole list when the bounds are not plain numbers."""
    numbers = re.fullmatch(r"\s*(-?\d+)\s*(?::\s*(-?\d+)\s*)?", bounds)
    if numbers is None:
        return whole
    rest = whole[int(numbers[1]) :]
    return rest if numbers[2] is None else rest[: int(numbers[2])]


def _edited(value: str, how: str, argument: str) -> str:
    """Apply ``${name#pattern}`` or another edit to a value."""
    if is_open(value):
        return value
    if len(value) > _MOST_EDITED or (how == "//" and len(value) * len(argument) > _MOST_TEXT):
        raise ValueError(f"a value of {len(value)} characters is edited")
    ends = range(len(value) + 1)
    match how:
        case ":":
            return "".join(_slice(list(value), argument))
        case "#" | "##":
            order = ends if how == "#" else reversed(ends)
            return next((value[end:] for end in order if fnmatch.fnmatchcase(value[:end], argument)), value)
        case "%" | "%%":
            order = reversed(ends) if how == "%" else ends
            return next((value[:start] for start in order if fnmatch.fnmatchcase(value[start:], argument)), value)
        case "/" | "//":
            old, _, new = argument.partition("/")
            return value.replace(old, new, -1 if how == "//" else 1)
        case "^" | "^^" | "," | ",,":
            changed = value.upper() if "^" in how else value.lower()
            return changed if len(how) == 2 else changed[:1] + value[1:]
    return value
