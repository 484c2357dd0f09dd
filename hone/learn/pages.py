"""Pages of ``docs/learn``, written from the texts and entries by ``scripts/make_docs``."""

from __future__ import annotations

import re

from hone.learn.entries import ENTRIES, NEEDS
from hone.learn.notes import CHECK_BOXES, WEEKS
from hone.learn.texts import PARTS, boxes, find_box
from hone.text import replace_between

BEGIN = "<!-- Generated from hone/learn by scripts/make_docs: do not edit from here -->"
END = "<!-- to here -->"


def part_page(part: str) -> str:
    """Return the page of a part: the texts of its boxes, without their hints."""
    lines = [
        f"# {PARTS[part]}",
        "",
        "<!-- Generated from hone/learn/boxes by scripts/make_docs. Do not edit. -->",
        "",
        f"Boxes of [the course](index.md), part {list(PARTS).index(part) + 1} of {len(PARTS)}. `hone learn next BOX` shows the same text, "
        "`hone learn hint BOX` helps, and `hone learn check BOX` checks your files and answers.",
    ]
    for box in boxes().values():
        if box.part == part:
            text = box.text()
            lines += ["", f"## {text.title}", "", f"Box `{box.name}`.{_needs(box.name)}"]
            for section, (heading, body) in text.sections.items():
                if section != "Hint":
                    lines += ["", f"### {heading}", "", body]
    return "\n".join(lines) + "\n"


def index_page(existing: str) -> str:
    """Return the index with new tables between the markers; the rest is unchanged.

    Raises:
        ValueError: the page does not have each marker exactly once.
    """
    names = list(ENTRIES)
    lines = ["### Boxes, by day of each entry", "", f"| Part | Box | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for box in boxes().values():
        days = [next((str(stop.day) for stop in ENTRIES[name].stops if stop.box == box.name), "") for name in names]
        lines.append(f"| {PARTS[box.part]} | {_link(box.name)} | {' | '.join(days)} |")
    lines += ["", "### Check boxes of the learning notes", "", "| Part | Check box | Boxes |", "|---|---|---|"]
    for part, entries in CHECK_BOXES.items():
        for words, meaning, names_of_boxes in entries:
            lines.append(f"| {PARTS[part]} | {words}: {meaning} | {', '.join(map(_link, names_of_boxes.split()))} |")
    lines += ["", "### Weeks of the 30-day path", "", "| Week | Aim | Boxes |", "|---|---|---|"]
    lines += [f"| {week} | {aim} | {', '.join(map(_link, names.split()))} |" for week, aim, names in WEEKS]
    return replace_between(existing, BEGIN, END, "\n".join(lines))


def _link(name: str) -> str:
    box = find_box(name)
    anchor = re.sub(r"[^\w\- ]", "", box.text().title.lower()).replace(" ", "-")
    return f"[{name}]({box.part}.md#{anchor})"


def _needs(name: str) -> str:
    return f" It uses the results of the box `{NEEDS[name]}`." if name in NEEDS else ""
