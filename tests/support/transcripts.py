"""Comparing what a page shows with what was really said, where process ids, paths and times differ."""

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def shown_in(page: str, beginning: str) -> list[str]:
    """Lines of the ``text`` block of a page that begins so."""
    found = re.findall(r"^```text\n(.*?)^```$", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S)
    (block,) = [block for block in found if block.startswith(beginning)]
    return block.splitlines()


def missing(shown: list[str], said: str) -> list[str]:
    """Lines that were not said in this order; a line of dots stands for any."""
    rest = iter([_plain(line) for line in said.splitlines()])
    return [line for line in shown if line != "..." and _plain(line) not in rest]


def _plain(line: str) -> str:
    """A line without what differs from run to run."""
    line = re.sub(r"pid \d+ on [\w.-]+", "pid", line)
    line = re.sub(r"[\w.-]*/[\w./-]*/", "", line)
    return re.sub(r"\d+(\.\d+)? s\b", "# s", line).rstrip()
