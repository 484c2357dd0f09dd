"""Parsing of text between marks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from hone.agents.parsers.base import Lexed, ParsedCall, Schemas, ToolParser, arguments_of


def blocks(text: str, begin: str, end: str) -> Iterator[tuple[str, bool]]:
    """Yield each text between ``begin`` and ``end``, and whether it was closed; skip text outside."""
    _, opened, rest = text.partition(begin)
    while opened:
        body, closed, after = rest.partition(end)
        yield body, bool(closed)
        _, opened, rest = after.partition(begin)


class SectionParser(ToolParser):
    """Parser of calls between marks inside one section.

    ``marks`` are the begin and end of the section, the begin and end of a call, and the separator of a call's head and arguments.
    """

    section: ClassVar[str] = "section"

    @abstractmethod
    def read(self, head: str, arguments: str) -> tuple[str, str, str | None]:
        """Return name, arguments and id (None without one) of a call."""

    def find(self, turn: Lexed, schemas: Schemas) -> tuple[str, list[ParsedCall]]:
        begin_all, end_all, begin, end, separator = (turn.mark(mark) for mark in self.marks)
        content, opened, rest = turn.text.partition(begin_all)
        if not opened:
            return content, []
        within, _, after = rest.partition(end_all)
        calls = []
        for body, closed in blocks(within, begin, end):
            head, _, tail = (turn.plain(part) for part in body.partition(separator))
            name, arguments, id = self.read(head.strip(), tail if closed else "")
            raw = turn.plain(begin + body + (end if closed else ""))
            if closed:
                calls.append(arguments_of(name, arguments, raw, id=id))
            else:
                calls.append(ParsedCall(name, None, raw, f"The call is not closed by {self.marks[3]}.", id))
        return content + after, calls or [
            ParsedCall("", None, opened + rest, f"The {self.section} has no {self.marks[2]}.")
        ]
