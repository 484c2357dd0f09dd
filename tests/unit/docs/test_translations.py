"""Translations: same structure, code, links, codes and numbers as the English text, and a mark where the source has changed."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import site_hooks  # noqa: E402
import translation_drift as drift  # noqa: E402

FILES = [path.relative_to(ROOT).as_posix() for path in drift.translations()]
ENGLISH = """# Title

See [data](data.md) and [start](start.md): `a.b` is 8.

```bash
hone a
```

## Codes

| Code | When | Check |
|---|---|---|
| R01 | files | One. |
| R03 | always | Three `x` of 5. |
"""
CHINESE = """# 标题

见[数据](data.md)和[入门](start.zh.md)：`a.b` 为 8。

```bash
hone b
```

## 代码

| 代码 | 时间 | 检查 |
|---|---|---|
| R01 | files | 一。 |
| R02 | files | 二。 |
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Return a Chinese page next to its source; start.md has a translation, data.md has none."""
    (tmp_path / "page.md").write_text(ENGLISH, encoding="utf-8")
    for name in ("data.md", "start.md", "start.zh.md"):
        (tmp_path / name).write_text("# x\n", encoding="utf-8")
    path = tmp_path / "page.zh.md"
    path.write_text(drift.accepted(drift.synced(CHINESE, ENGLISH), ENGLISH), encoding="utf-8")
    return path


@pytest.mark.parametrize("name", FILES)
def test_a_translation_has_code_links_codes_and_numbers_of_its_source(name: str) -> None:
    assert not drift.faults(ROOT / name)
    text, english = drift.read_pair(ROOT / name)
    assert drift.CODE.findall(text) == drift.CODE.findall(english), "a reader copies the commands that tests run"
    assert len(drift.CODE.findall(english)) == text.count("```") // 2 + len(re.findall(r"\n\n    \S", text)), (
        "all code is seen"
    )
    assert all(section.source for section in drift.sections(text, drift.is_whole(ROOT / name))), "run --accept"


def test_the_first_hour_exists_in_each_language() -> None:
    pages = [ROOT / "docs" / "quickstart.md", ROOT / "docs" / "troubleshooting.md"]
    boxes = [path for part in ("first_run", "data", "algorithms") for path in (drift.BOXES / part).glob("??_*.md")]
    english = [path for path in (*pages, *boxes) if not drift.TRANSLATED.search(path.name)]
    missing = [
        f"{path.name}: {language}"
        for path in english
        for language in drift.LANGUAGES
        if not path.with_suffix(f".{language}.md").is_file()
    ]
    assert len(english) > 2 and not missing


def test_syncing_copies_code_and_rows_and_keeps_the_translated_rows(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "hone a" in text and "hone b" not in text
    assert "| R01 | files | 一。 |" in text and "| R03 | always | Three `x` of 5. |" in text and "R02" not in text
    assert not drift.faults(page)
    with pytest.raises(ValueError, match="2 code blocks, and 1 in the source"):
        drift.synced(text + "\n```\n```\n", ENGLISH)


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("hone a", "hone c", "other code blocks"),
        ("## 代码", "# 代码", "headings"),
        ("start.zh.md", "start.md", "links"),
        ("`a.b`", "`a.c`", "inline code: lacks ['a.b'], has also ['a.c']"),
        ("为 8", "为 9", "numbers: lacks ['8'], has also ['9']"),
        ("| R03 |", "| R04 |", "other codes"),
        ("Three `x` of 5", "三个 `x`，共 6", "R03 | always |: numbers: lacks ['5'], has also ['6']"),
    ],
)
def test_what_differs_from_the_source_is_named(page: Path, right: str, wrong: str, fault: str) -> None:
    text = page.read_text(encoding="utf-8")
    assert right in text
    page.write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert any(fault in message for message in drift.faults(page)), drift.faults(page)


def test_prose_of_an_older_section_may_differ_and_its_code_may_not(page: Path) -> None:
    changed = ENGLISH.replace("[data](data.md)", "`a.c`").replace("is 8", "is 9").replace("of 5", "of 7")
    page.with_name("page.md").write_text(changed, encoding="utf-8")
    assert len(drift.older(*drift.read_pair(page))) == 2 and not drift.faults(page)
    page.with_name("page.md").write_text(changed.replace("hone a", "hone c").replace("R03", "R04"), encoding="utf-8")
    assert [message.partition(";")[0] for message in drift.faults(page)] == [
        "'标题': other code blocks",
        "'代码': other codes",
    ]


def test_a_section_whose_source_has_changed_is_older_until_it_is_accepted(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not drift.older(text, ENGLISH)
    same = ENGLISH.replace("hone a", "hone c").replace(" and [start]", "\nand [start]")
    assert not drift.older(text, same), "code is compared, and the ends of lines do not matter"
    changed = ENGLISH.replace("| One. |", "| Another. |")
    assert [section.heading for section in drift.older(text, changed)] == ["代码"]
    again = drift.accepted(text, changed)
    assert not drift.older(again, changed) and drift.accepted(again, changed) == again
    whole = drift.accepted(CHINESE, ENGLISH, whole=True)
    assert whole.count("<!-- source: ") == 1
    assert not drift.older(whole, ENGLISH, whole=True) and drift.older(whole, changed, whole=True)


def test_the_site_marks_an_older_section_in_its_language(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert site_hooks.with_notes(text, "page.zh.md", []) == text
    page.with_name("page.md").write_text(ENGLISH.replace("One.", "Another."), encoding="utf-8")
    config = {"docs_dir": str(page.parent), "repo_url": ""}
    shown = SimpleNamespace(file=SimpleNamespace(src_uri="page.zh.md"))
    before, after = site_hooks.on_page_markdown(text, shown, config, []).split("## 代码\n")
    assert "!!!" not in before and after.lstrip().startswith('!!! warning ""\n    这一节')
    assert "[英文版](page.md)" in after
    assert set(site_hooks.OLDER) == set(site_hooks.LANGUAGES)


def test_the_site_marks_an_older_box_on_the_pages_of_the_course(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "data.vi.md"
    text = (drift.COURSE_PAGES / name).read_text(encoding="utf-8")
    shutil.copytree(drift.BOXES / "data", tmp_path / "data")
    for path in (tmp_path / "data").glob("*.vi.md"):
        path.write_text(drift.accepted(*drift.read_pair(path), whole=True), encoding="utf-8")
    monkeypatch.setattr(drift, "BOXES", tmp_path)
    assert drift.older_boxes(name) == []
    box = tmp_path / "data" / "04_data_check.md"
    box.write_text(box.read_text(encoding="utf-8") + "More.\n", encoding="utf-8")
    assert drift.older_boxes(name) == ["Kiểm tra trước khi huấn luyện"]
    shown = SimpleNamespace(file=SimpleNamespace(src_uri=f"learn/{name}"))
    marked = site_hooks.on_page_markdown(text, shown, {"docs_dir": str(ROOT / "docs"), "repo_url": ""}, [])
    assert marked.count("!!!") == 1 and marked.index("!!!") > marked.index("## Kiểm tra trước khi huấn luyện")


def test_the_script_counts_what_is_older_and_fails_for_it_only_with_check(
    page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "scripts" / "translations")
    for name, value in (("FOLDERS", (page.parent,)), ("ROOT", page.parent)):
        monkeypatch.setattr(drift, name, value)
    (page.parent / "start.zh.md").unlink()

    def run(*options: str) -> int:
        monkeypatch.setattr(sys, "argv", [script, *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(script, run_name="__main__")
        return int(ended.value.code or 0)

    text = page.read_text(encoding="utf-8").replace("start.zh.md", "start.md")
    page.write_text(text, encoding="utf-8")
    assert run("--check") == 0
    source = page.with_name("page.md")
    source.write_text(ENGLISH.replace("One.", "Another.").replace("hone a", "hone c"), encoding="utf-8")
    assert run() == 1 and "'标题': other code blocks" in capsys.readouterr().out
    assert run("--sync") == 0 and run("--check") == 1
    shown = capsys.readouterr().out
    assert "page.zh.md: '代码' is older" in shown and "1 sections older than their source, 0 differences" in shown
    assert run("--accept", str(page), "--check") == 0 and "hone c" in page.read_text(encoding="utf-8")
    page.write_text("# 标题\n", encoding="utf-8")
    assert run() == 1 and "1 headings with other levels" in capsys.readouterr().out
    assert run("--accept", str(page)) == 1 and page.read_text(encoding="utf-8") == "# 标题\n"
