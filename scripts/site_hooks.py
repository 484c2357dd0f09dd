"""Hooks of mkdocs for the site (``mkdocs.yml``): navigation by folders, links out of docs/, anchors as on code hosts.

Pages are written for readers of the repository. Some things differ on the site: a link to a file outside docs/ leads to
the repository, or becomes text where its address is not configured; a fence that names a file gets it as its title;
headings get the anchors of code hosts, which the tests of the pages check; a page with translations links to them, and a translated section that is older than its
source says so.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from translation_drift import COURSE_PAGES, LANGUAGES, ROOT, TRANSLATED, older, older_boxes, read_pair, sections

DOCS = ROOT / "docs"
OLDER = {
    "zh": "这一节的译文比英文原文旧：以[英文版]({page})为准。",
    "vi": "Bản dịch của mục này cũ hơn bản gốc: hãy theo [bản tiếng Anh]({page}).",
}
"""What the site says below the heading of a translated section that is older than its source."""
FENCED = re.compile(r"(^```.*?^```$)", re.M | re.S)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


def all_pages(docs: Path = DOCS) -> set[str]:
    """Return the paths of all pages below docs/."""
    return {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}


def translation(page: str, language: str) -> str:
    """Return the path that the translation of an English page has; ``en`` gives the page."""
    return page if language == "en" else f"{page.removesuffix('.md')}.{language}.md"


def entries(nav: list[Any]) -> Iterator[str]:
    """Yield the paths that a navigation names, depth first."""
    for item in nav:
        for value in item.values() if isinstance(item, dict) else (item,):
            yield from entries(value) if isinstance(value, list) else (value,)


def expanded(nav: list[Any], pages: set[str]) -> list[Any]:
    """Return a navigation with the pages of a folder in place of each entry that ends in ``/``, and with the translations."""
    english = {page for page in pages if not TRANSLATED.search(page)}
    named = {entry for entry in entries(nav) if not entry.endswith("/")}

    def expand(items: list[Any]) -> Iterator[Any]:
        for item in items:
            if isinstance(item, str) and item.endswith("/"):
                inside = (page for page in english - named if page.startswith(item))
                yield from sorted(inside, key=lambda page: (not page.endswith(("index.md", "README.md")), page))
            elif isinstance(item, dict):
                whole = {key: list(expand(value)) if isinstance(value, list) else value for key, value in item.items()}
                yield from [whole] if all(whole.values()) else []
            else:
                yield item

    whole = list(expand(nav))
    order = list(entries(whole))
    for language, name in LANGUAGES.items():
        translated = [page for page in (translation(entry, language) for entry in order) if page in pages]
        whole += [{name: translated}] if translated else []
    return whole


def on_config(config: Any) -> Any:
    """Expand the navigation, show version and commit, and make anchors as code hosts do."""
    from pymdownx.slugs import slugify  # pyright: ignore[reportMissingImports]  # of the extra docs, which lint does not install

    version = re.search(r'^__version__ = "([^"]+)"', (ROOT / "hone/__init__.py").read_text(encoding="utf-8"), re.M)
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    of_commit = f", commit {commit.stdout.strip()}" if commit.returncode == 0 else ""
    config["copyright"] = f"Pages of Hone {version[1] if version else ''}{of_commit}; Apache License 2.0"
    config["nav"] = expanded(config["nav"], all_pages(Path(config["docs_dir"])))
    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite what differs between the repository and the site."""
    name = page.file.src_uri
    if TRANSLATED.search(name):
        path = Path(config["docs_dir"]) / name
        of_course = path.parent == COURSE_PAGES
        stale = older_boxes(path.name) if of_course else [section.heading for section in older(*read_pair(path))]
        markdown = with_notes(markdown, name, stale)
    text = for_site(markdown, name, config["repo_url"] or "")
    return with_languages(text, name, {file.src_uri for file in files})


def with_languages(markdown: str, page: str, pages: set[str]) -> str:
    """Return the text of a page with links to the same page in other languages below its title."""
    english = TRANSLATED.sub(".md", page)
    others = {
        name: path
        for language, name in {"en": "English", **LANGUAGES}.items()
        if (path := translation(english, language)) in pages and path != page
    }
    if not others:
        return markdown
    links = " · ".join(f"[{name}]({PurePosixPath(path).name})" for name, path in others.items())
    return re.sub(r"^(# .+)$", lambda title: f"{title[1]}\n\n{links}", markdown, count=1, flags=re.M)


def with_notes(markdown: str, page: str, stale: list[str]) -> str:
    """Return the text of a translated page with a note in its language below the headings that are older than their source."""
    language = page.split(".")[-2]
    note = OLDER[language].format(page=PurePosixPath(TRANSLATED.sub(".md", page)).name)
    text = ""
    for section in sections(markdown):
        heading, _, rest = section.text.partition("\n")
        text += f'{heading}\n\n!!! warning ""\n    {note}\n{rest}' if section.heading in stale else section.text
    return text


def for_site(markdown: str, page: str, repository: str) -> str:
    """Return the text of a page, its path relative to docs/, for the site."""
    parts = FENCED.split(markdown)
    for at, part in enumerate(parts):
        if FENCED.match(part):
            parts[at] = re.sub(r'^```(\w+) ([^\s"]+)$', r'```\1 title="\2"', part, count=1, flags=re.M)
        else:
            parts[at] = LINK.sub(lambda link: _outward(link, page, repository), part)
    return "".join(parts)


def _outward(link: re.Match[str], page: str, repository: str) -> str:
    """Return a link that leaves docs/ as one to the repository, or as text."""
    text, target = link[1], link[2]
    path, hash_sign, anchor = target.partition("#")
    inside = (DOCS / PurePosixPath(page).parent / path).resolve()
    if inside.is_relative_to(DOCS) or not inside.is_relative_to(ROOT):
        return link[0]
    name = inside.relative_to(ROOT).as_posix()
    if repository:
        return f"[{text}]({repository.rstrip('/')}/blob/main/{name}{hash_sign}{anchor})"
    return text if name in text else f"{text} (`{name}`)"
