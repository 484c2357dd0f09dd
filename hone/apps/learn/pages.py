"""Pages of ``docs/learn``, written from the texts and entries by ``scripts/make_docs``."""

from __future__ import annotations

import re
from typing import Any

from hone.apps.learn.progress import ENTRIES, NEEDS
from hone.apps.learn.texts import COURSE, ENGLISH, PARTS, boxes, find_box
from hone.text import replace_between

BEGIN = "<!-- Generated from hone/apps/learn by scripts/make_docs: do not edit from here -->"
END = "<!-- to here -->"


PHRASES: dict[str, dict[str, Any]] = COURSE["phrases"]
"""Sentences of a page around its boxes, by language."""


def part_pages() -> dict[str, str]:
    """Return the pages of all parts in all languages that have them, by file name."""
    return {
        f"{part}.md" if language == ENGLISH else f"{part}.{language}.md": part_page(part, language)
        for language, phrases in PHRASES.items()
        for part in phrases.get("titles", PARTS)
    }


def part_page(part: str, language: str = ENGLISH) -> str:
    """Return the page of a part: the texts of its boxes, without their hints."""
    phrases = PHRASES[language]
    lines = [
        f"# {phrases.get('titles', PARTS)[part]}",
        "",
        "<!-- Generated from hone/apps/learn/boxes by scripts/make_docs. Do not edit. -->",
        "",
        phrases["opening"].format(part=list(PARTS).index(part) + 1, parts=len(PARTS)),
    ]
    for box in boxes().values():
        if box.part == part:
            text = box.text(language)
            needs = phrases["needs"].format(name=NEEDS[box.name]) if box.name in NEEDS else ""
            lines += ["", f"## {text.title}", "", phrases["box"].format(name=box.name) + needs]
            for section, (heading, body) in text.sections.items():
                if section != "Hint":
                    lines += ["", f"### {heading}", "", body]
    return "\n".join(lines) + "\n"


def index_page(existing: str) -> str:
    """Return the index with new tables between the markers; the rest is unchanged."""
    names = list(ENTRIES)
    lines = ["### Boxes, by day of each entry", "", f"| Part | Box | {' | '.join(f'`{name}`' for name in names)} |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for box in boxes().values():
        days = [next((str(stop.day) for stop in ENTRIES[name].stops if stop.box == box.name), "") for name in names]
        lines.append(f"| {PARTS[box.part]} | {_link(box.name)} | {' | '.join(days)} |")
    lines += ["", "### Check boxes of the learning notes", "", "| Part | Check box | Boxes |", "|---|---|---|"]
    for part, entries in COURSE["check_boxes"].items():
        for words, meaning, names_of_boxes in entries:
            lines.append(f"| {PARTS[part]} | {words}: {meaning} | {', '.join(map(_link, names_of_boxes.split()))} |")
    lines += ["", "### Weeks of the 30-day path", "", "| Week | Aim | Boxes |", "|---|---|---|"]
    lines += [f"| {week} | {aim} | {', '.join(map(_link, names.split()))} |" for week, aim, names in COURSE["weeks"]]
    return replace_between(existing, BEGIN, END, "\n".join(lines))


def _link(name: str) -> str:
    box = find_box(name)
    anchor = re.sub(r"[^\w\- ]", "", box.text().title.lower()).replace(" ", "-")
    return f"[{name}]({box.part}.md#{anchor})"
