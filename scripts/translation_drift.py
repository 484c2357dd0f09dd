"""Translated texts next to their English sources: what differs in structure, and which sections are older than their source.

A translation of ``page.md`` is ``page.zh.md`` or ``page.vi.md``. Below each heading it has a comment with a short SHA-256 of the
prose of the English section that it translates, ``<!-- source: 1a2b3c4d -->``; a box of the course has one comment for the
whole text. Code blocks are not part of the hash: they equal those of the source, and :func:`synced` copies them.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOXES = ROOT / "hone" / "apps" / "learn" / "boxes"
COURSE_PAGES = ROOT / "docs" / "learn"
FOLDERS = (ROOT / "docs", BOXES)
LANGUAGES = {"zh": "中文", "vi": "Tiếng Việt"}
TRANSLATED = re.compile(rf"\.({'|'.join(LANGUAGES)})\.md$")
CODE = re.compile(r"^```[^\n]*\n(?:.*?\n)??```$|(?<=\n\n)(?: {4}[^\n]*\n)+", re.M | re.S)
"""A fenced block, or lines indented by four spaces (formulas)."""
COMMENT = re.compile(r"<!--.*?-->", re.S)
SOURCE = re.compile(r"\n*<!-- source: ([0-9a-f]{8}) -->\n*")
HEADING = re.compile(r"^(#{1,6}) (.+)$", re.M)
LINK = re.compile(r"\]\(([^)\s]+)\)")
INLINE = re.compile(r"(?<!`)(`+)(?!`)(?P<kept>.+?)(?<!`)\1(?!`)")
NUMBER = re.compile(r"(?P<kept>\d+(?:[.,]\d+)*)")
ROW = re.compile(r"^\| ((?:R\d\d|[DE]-[\w-]+) \|(?: [a-z ]+ \|(?= ))?).*\n", re.M)
"""A row of a table of codes; the group has the code, and the stage where there is one."""
TABLE = re.compile(rf"(?:{ROW.pattern})+", re.M)


@dataclass(frozen=True)
class Section:
    """A heading with the text below it.

    Attributes:
        level: number of ``#`` of the heading.
        heading: text of the heading.
        text: Markdown of the section, heading included.
    """

    level: int
    heading: str
    text: str

    @property
    def prose(self) -> str:
        """Text without code blocks and comments, each run of white space as one space."""
        return " ".join(COMMENT.sub("", CODE.sub("", self.text)).split())

    @property
    def without_codes(self) -> str:
        """Prose without the rows of tables of codes."""
        return Section(self.level, self.heading, ROW.sub("", self.text)).prose

    @property
    def digest(self) -> str:
        """First 8 hexadecimal digits of the SHA-256 of the prose."""
        return hashlib.sha256(self.prose.encode()).hexdigest()[:8]

    @property
    def source(self) -> str | None:
        """Hash of the source that a translated section names."""
        match = SOURCE.search(self.text)
        return match[1] if match else None


def sections(markdown: str, whole: bool = False) -> list[Section]:
    """Split Markdown at its headings; ``whole`` gives the text as one section."""
    plain = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), markdown)
    headings = list(HEADING.finditer(plain))
    if not headings:
        raise ValueError("a text begins with a heading")
    starts = [0, *(match.start() for match in headings[1:])]
    if whole:
        headings, starts = headings[:1], [0]
    bounds = pairwise([*starts, len(markdown)])
    return [Section(len(m[1]), m[2], markdown[a:b]) for m, (a, b) in zip(headings, bounds, strict=True)]


def translations() -> list[Path]:
    """Return all translated files, sorted, without the pages that scripts/make_docs writes from the boxes."""
    files = [path for folder in FOLDERS for path in folder.rglob("*.md") if TRANSLATED.search(path.name)]
    return sorted(path for path in files if path.parent != COURSE_PAGES)


def source_of(path: Path) -> Path:
    """Return the English file of a translated one."""
    return path.with_name(TRANSLATED.sub(".md", path.name))


def read_pair(path: Path) -> tuple[str, str]:
    """Return the text of a translated file and of its source.

    Raises:
        FileNotFoundError: there is no such translation, or no English file next to it.
    """
    return path.read_text(encoding="utf-8"), source_of(path).read_text(encoding="utf-8")


def is_whole(path: Path) -> bool:
    """Return whether a file has one hash for its whole text: the boxes of the course."""
    return path.is_relative_to(BOXES)


def older(translated: str, english: str, whole: bool = False) -> list[Section]:
    """Return the translated sections whose source is another text than the one that they name.

    Raises:
        ValueError: the texts have different headings.
    """
    pairs = zip(sections(translated, whole), sections(english, whole), strict=True)
    return [section for section, source in pairs if section.source != source.digest]


def older_boxes(page: str) -> list[str]:
    """Return the titles of the boxes on a translated page of the course that are older than their source."""
    part, language, _ = page.split(".")
    files = sorted((BOXES / part).glob(f"*.{language}.md"))
    return [section.heading for path in files for section in older(*read_pair(path), whole=True)]


def accepted(translated: str, english: str, whole: bool = False) -> str:
    """Return the translated text with the current hash of the source in each section.

    Raises:
        ValueError: the texts have different headings.
    """
    pieces = []
    for section, source in zip(sections(translated, whole), sections(english, whole), strict=True):
        heading, _, rest = SOURCE.sub("\n\n", section.text, count=1).partition("\n")
        pieces.append(f"{heading}\n\n<!-- source: {source.digest} -->\n\n{rest.lstrip(chr(10))}")
    return "".join(pieces)


def synced(translated: str, english: str) -> str:
    """Return the translated text with the code blocks of the source, and with rows for the codes of its tables.

    A new code gets the English row; a code that the source no longer has is left out.

    Raises:
        ValueError: the texts do not have the same number of code blocks or of tables of codes.
    """
    blocks = iter(_paired(CODE, translated, english, "code blocks"))
    text = CODE.sub(lambda _: next(blocks)[1], translated)
    tables = iter(_paired(TABLE, text, english, "tables of codes"))
    return TABLE.sub(lambda _: _rows(*next(tables)), text)


def _paired(pattern: re.Pattern[str], translated: str, english: str, what: str) -> list[tuple[str, str]]:
    """Return what a pattern matches in both texts, pair by pair."""
    first, second = ([match[0] for match in pattern.finditer(text)] for text in (translated, english))
    if len(first) != len(second):
        raise ValueError(f"{len(first)} {what}, and {len(second)} in the source")
    return list(zip(first, second, strict=True))


def _rows(translated: str, english: str) -> str:
    """Return the rows of a table of codes, in the order of the source."""
    rows, wanted = ([(match[1], match[0]) for match in ROW.finditer(table)] for table in (translated, english))
    matcher = difflib.SequenceMatcher(a=[key for key, _ in rows], b=[key for key, _ in wanted], autojunk=False)
    lines = []
    for tag, a, b, c, d in matcher.get_opcodes():
        lines += rows[a:b] if tag == "equal" else wanted[c:d]
    return "".join(line for _, line in lines)


def faults(path: Path) -> list[str]:
    """Return where a translated file differs from its source in what is not prose.

    Levels of headings, code blocks, and the codes of tables must agree; in sections that are not older than their source also
    targets of links, inline code and numbers.
    """
    translated, english = read_pair(path)
    ours, theirs = sections(translated), sections(english)
    if [section.level for section in ours] != [section.level for section in theirs]:
        return [f"{len(ours)} headings with other levels than the {len(theirs)} of the source"]
    language = path.name.split(".")[-2]
    stale = older(translated, english, is_whole(path))
    messages = []
    for section, source in zip(ours, theirs, strict=True):
        here = f"'{section.heading}'"
        if CODE.findall(section.text) != CODE.findall(source.text):
            messages.append(f"{here}: other code blocks; run scripts/translations --sync")
        if [row[1] for row in ROW.finditer(section.text)] != [row[1] for row in ROW.finditer(source.text)]:
            messages.append(f"{here}: other codes; run scripts/translations --sync")
        if section in stale or (stale and is_whole(path)):
            continue
        wanted = sorted(_localized(target, path, language) for target in LINK.findall(source.prose))
        if (links := sorted(LINK.findall(section.prose))) != wanted:
            messages.append(f"{here}: links {links}, not {wanted}")
        messages += [f"{here}: {message}" for message in _differences(section.without_codes, source.without_codes)]
        rows = zip(ROW.finditer(section.text), ROW.finditer(source.text), strict=False)
        messages += [f"{row[1]}: {message}" for row, other in rows for message in _differences(row[0], other[0])]
    return messages


def _differences(translated: str, english: str) -> list[str]:
    """Return the inline code and the numbers that only one of two pieces of prose has."""
    messages = []
    for what, pattern in (("inline code", INLINE), ("numbers", NUMBER)):
        ours, theirs = ({match["kept"] for match in pattern.finditer(text)} for text in (translated, english))
        if ours != theirs:
            messages.append(f"{what}: lacks {sorted(theirs - ours)}, has also {sorted(ours - theirs)}")
    return messages


def _localized(target: str, page: Path, language: str) -> str:
    """Return the target of an English link as a translation has it: the translated page where there is one."""
    path, hash_sign, anchor = target.partition("#")
    translated = TRANSLATED.sub("", path).removesuffix(".md") + f".{language}.md"
    exists = path.endswith(".md") and Path(os.path.normpath(page.parent / translated)).is_file()
    return f"{translated if exists else path}{hash_sign}{anchor}"
