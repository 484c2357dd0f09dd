"""Texts of the boxes: Markdown files with fixed sections, in English and in other languages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hone.errors import HoneError, did_you_mean
from hone.text import read_yaml

FOLDER = Path(__file__).parent / "boxes"
COURSE: dict[str, Any] = read_yaml((Path(__file__).parent / "course.yaml").read_text(encoding="utf-8"))
PARTS: dict[str, str] = COURSE["parts"]
SECTIONS = ("Read", "Do", "Look", "Quiz", "Hint")
"""Sections of a text, in order; only the quiz may be absent."""
ENGLISH = "en"
_FILE = re.compile(r"(\d\d)_([a-z0-9_]+)\.md")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.M | re.S)
_QUESTION = re.compile(r"^(\d)\. (.*?)(?=^\d\. |\Z)", re.M | re.S)


@dataclass(frozen=True)
class Text:
    """Text of a box in one language."""

    title: str
    # English name of each section to its heading in this language and its Markdown
    sections: dict[str, tuple[str, str]]
    language: str = ENGLISH  # language of the text, such as ``zh``

    def body(self, section: str) -> str:
        """Return the Markdown of a section, empty if the text has none of that name."""
        return self.sections.get(section, ("", ""))[1]

    @property
    def questions(self) -> list[str]:
        return [" ".join(match[2].split()) for match in _QUESTION.finditer(self.body("Quiz"))]


@dataclass(frozen=True)
class Box:
    name: str  # name, unique in the course
    part: str  # one of :data:`PARTS`
    file: Path  # its English text

    def text(self, language: str = ENGLISH) -> Text:
        """Return the text in a language, or in English where there is no such file; :attr:`Text.language` says which."""
        english = parse(self.file.read_text(encoding="utf-8"))
        translated = self.file.with_suffix(f".{language}.md")
        if language == ENGLISH or not translated.is_file():
            return english
        return parse(translated.read_text(encoding="utf-8"), english, language, str(translated))


@cache
def boxes(folder: Path = FOLDER) -> dict[str, Box]:
    """Return all boxes by name, in the order of parts and of the numbers of their files."""
    listed = [
        Box(match[2], part, file)
        for part in PARTS
        for file in sorted((folder / part).glob("*.md"))
        if (match := _FILE.fullmatch(file.name))
    ]
    return {box.name: box for box in listed}


def find_box(name: str) -> Box:
    known = boxes()
    if name not in known:
        raise HoneError(f"no box '{name}'", fix=did_you_mean(name, known), code="E-learn", where="hone learn")
    return known[name]


def parse(markdown: str, english: Text | None = None, language: str = ENGLISH, where: str = "") -> Text:
    """Split the Markdown of a box into title and sections, comments left out.

    A translation has the sections of the ``english`` text, in the same order under headings of its language. ``where`` is the
    file, for error messages.
    """
    title, *parts = re.split(r"^## ", _COMMENT.sub("", markdown), flags=re.M)
    pieces = [part.partition("\n")[::2] for part in parts]
    names = [heading.strip() for heading, _ in pieces]
    wanted = list(english.sections) if english else [name for name in SECTIONS if name != "Quiz" or name in names]
    if len(names) != len(wanted) or (english is None and names != wanted):
        raise HoneError(
            f"the sections are {', '.join(names)}, not {', '.join(wanted)}",
            fix="give a translation the sections of the English file, in its order",
            code="E-learn",
            where=where or title.strip(),
        )
    sections = {key: (name, body.strip()) for key, name, (_, body) in zip(wanted, names, pieces, strict=True)}
    return Text(title.strip().removeprefix("# ").strip(), sections, language)
