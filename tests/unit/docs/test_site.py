"""The site: its navigation names every page, translations join it, and links out of docs/ and fences read well there."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import check_site  # noqa: E402
import site_hooks  # noqa: E402


class Loader(yaml.SafeLoader):
    """YAML with mkdocs' tag for environment variables."""


Loader.add_constructor("!ENV", lambda loader, node: loader.construct_sequence(node)[-1])  # type: ignore[arg-type]


def nav() -> list[Any]:
    return yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]


def test_the_navigation_names_every_page_once() -> None:
    pages = site_hooks.all_pages()
    named = Counter(site_hooks.entries(site_hooks.expanded(nav(), pages)))
    assert not pages - set(named), "pages without a place in the navigation of mkdocs.yml"
    assert not set(named) - pages, "entries of mkdocs.yml without a page"
    assert not [page for page, times in named.items() if times > 1]


def test_translations_get_a_section_in_the_order_of_the_english_pages() -> None:
    pages = {"index.md", "b.md", "a.md", "c/a.md", "c/index.md", "a.zh.md", "b.zh.md", "c/a.vi.md"}
    whole = site_hooks.expanded([{"Home": "index.md"}, {"All": ["b.md", "a.md", "c/"]}, {"None": ["d/"]}], pages)
    assert whole == [
        {"Home": "index.md"},
        {"All": ["b.md", "a.md", "c/index.md", "c/a.md"]},
        {"中文": ["b.zh.md", "a.zh.md"]},
        {"Tiếng Việt": ["c/a.vi.md"]},
    ]
    linked = site_hooks.with_languages("# 标题\n\n文", "a.zh.md", {"a.md", "a.zh.md", "a.vi.md"})
    assert linked == "# 标题\n\n[English](a.md) · [Tiếng Việt](a.vi.md)\n\n文"
    assert site_hooks.with_languages("# Title\n", "b.md", {"b.md"}) == "# Title\n"


def test_links_out_of_docs_lead_to_the_repository_or_become_text() -> None:
    page = "See [`hone/errors.py`](../hone/errors.py), [the rules](../CONTRIBUTING.md#style) and [data](data.md)."
    assert site_hooks.for_site(page, "config.md", "") == (
        "See `hone/errors.py`, the rules (`CONTRIBUTING.md`) and [data](data.md)."
    )
    there = site_hooks.for_site(page, "config.md", "https://example.org/hone/")
    assert "(https://example.org/hone/blob/main/CONTRIBUTING.md#style)" in there
    deep = site_hooks.for_site("[a](../../notebooks/x.ipynb) [b](../data.md)", "algorithms/grpo.md", "")
    assert deep == "a (`notebooks/x.ipynb`) [b](../data.md)"


def test_a_fence_with_a_file_name_gets_a_title_and_its_text_is_kept() -> None:
    page = "```python my.py\n# [a](../hone)\n```\n\n```bash\nls\n```\n"
    assert site_hooks.for_site(page, "data.md", "") == page.replace("python my.py", 'python title="my.py"')


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ('<a href="b.html#here">x</a> <a href="https://example.org/a?b#c">y</a> <a href="#top">z</a>', None),
        ('<a href="b.html#gone">x</a>', "no anchor for b.html#gone"),
        ('<a href="c.html">x</a>', "no file for c.html"),
        ('<img src="gone.png">', "no file for gone.png"),
        ('<a href="https:///path">x</a>', "malformed address"),
        ("<p>A list:\n- one\n- two</p>", "not rendered"),
        ("<p>| a | b |</p>", "not rendered"),
        ("<p><strong>1. Bold.</strong> text <code>](x)</code> - and a dash</p>", None),
    ],
)
def test_faults_of_a_built_site_are_found(body: str, fault: str | None, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(f'<h1 id="top">A</h1>{body}', encoding="utf-8")
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1>', encoding="utf-8")
    faults = list(check_site.problems(tmp_path))
    assert (len(faults) == 1 and fault in faults[0]) if fault else not faults, faults
