"""The grammar of bash, from tree-sitter: a script as a syntax tree, and the ``exit`` at which one ends before training."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

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
