#!/usr/bin/env python3
"""Check a built site: every internal link leads to a file and to an anchor in it, every external address is well formed, and no
Markdown is left unrendered.

``scripts/site`` runs it. External pages are not requested, so it needs no network.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

UNRENDERED = re.compile(r"^\s*(?:[-*] |\d+\. |\|.*\|\s*$|#+ |```)|\]\([^)\s]+\)", re.M)
"""Text of a paragraph that reads as Markdown: a list without a blank line before it, a table, a fence, a link."""
LINKS = {"href", "src"}


class Page(HTMLParser):
    """The anchors, the links and the text of the paragraphs of one HTML file."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.paragraphs: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect anchors and links; a paragraph begins."""
        for name, value in attrs:
            if value and (name == "id" or (name == "name" and tag == "a")):
                self.anchors.add(value)
            elif value and name in LINKS:
                self.links.append(value)
        if tag in ("p", "a", "code", "em", "pre", "script", "strong"):
            self._inside.append(tag)
            if tag == "p":
                self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        """End a paragraph or what is inside it."""
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        """Collect the text of paragraphs that no other element holds."""
        if self._inside == ["p"]:
            self.paragraphs[-1] += data


def problems(site: Path) -> Iterator[str]:
    """Yield one line for each fault of a built site."""
    pages = {path.resolve(): Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        name = path.relative_to(site.resolve()).as_posix()
        if name == "404.html":  # its links are absolute: it is shown at any address
            continue
        yield from (f"{name}: {fault}" for link in page.links if (fault := fault_of(link, path, pages)))
        for text in page.paragraphs:
            if match := UNRENDERED.search(text):
                yield f"{name}: not rendered: {text[max(0, match.start() - 40) : match.end() + 40].strip()!r}"


def fault_of(link: str, path: Path, pages: dict[Path, Page]) -> str | None:
    """Return what is wrong with a link of a page, or None."""
    parts = urlsplit(link)
    if parts.scheme in ("http", "https"):
        well_formed = re.fullmatch(r"[\w-]+(?:\.[\w-]+)*(?::\d+)?", parts.netloc) and not re.search(r"\s", link)
        return None if well_formed else f"malformed address {link}"
    if parts.scheme:
        return None if parts.scheme in ("data", "mailto") else f"unknown scheme {link}"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file():
        return f"no file for {link}"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return f"no anchor for {link}"
    return None


def main() -> int:
    """Print every fault; the exit code is 1 when there is one."""
    site = Path(sys.argv[1])
    pages = len(list(site.rglob("*.html")))
    if not pages:
        print(f"{site} has no pages. Fix: build the site first, with scripts/site")
        return 1
    faults = list(problems(site))
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{pages} pages, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
