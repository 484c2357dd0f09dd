"""Pieces of text between marks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from hone.agents.parsers.base import Found, Lexed, Schemas, ToolParser, arguments_of


def blocks(text: str, begin: str, end: str) -> Iterator[tuple[str, bool]]:
    """Yield what stands between ``begin`` and ``end``, and whether it was closed; what stands outside is left out."""
    _, opened, rest = text.partition(begin)
    while opened:
        body, closed, behind = rest.partition(end)
        yield body, bool(closed)
        _, opened, rest = behind.partition(begin)


class SectionParser(ToolParser):
    """Reads calls that stand between marks of their own within one section. ``marks`` are the begin and end of the section, the
    begin and end of a call, and what parts a call's head from its arguments.
    """

    section: ClassVar[str] = "section"

    @abstractmethod
    def read(self, head: str, arguments: str) -> tuple[str, str, str | None]:
        """Return name, arguments and id (None: it has none) of a call."""

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[Found]]:
        """Return the text outside the section, and the calls within."""
        begin_all, end_all, begin, end, separator = (turn.mark(mark) for mark in self.marks)
        content, opened, rest = turn.text.partition(begin_all)
        if not opened:
            return content, []
        within, _, behind = rest.partition(end_all)
        found = []
        for body, closed in blocks(within, begin, end):
            head, _, tail = (turn.plain(part) for part in body.partition(separator))
            name, arguments, id = self.read(head.strip(), tail if closed else "")
            raw = turn.plain(begin + body + (end if closed else ""))
            if closed:
                found.append(arguments_of(name, arguments, raw, id=id))
            else:
                found.append(Found(name, None, raw, f"The call is not closed by {self.marks[3]}.", id))
        return content + behind, found or [
            Found("", None, opened + rest, f"The {self.section} has no {self.marks[2]}.")
        ]
