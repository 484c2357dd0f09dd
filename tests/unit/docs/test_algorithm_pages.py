"""docs/algorithms: one page a method, facts from the registries, and a note by a person on each."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hone import algorithms
from hone.apps.explain.catalogue import algorithm_pages, methods
from hone.apps.explain.catalogue.pages import BEGIN, END, TO_WRITE, hand_written, splice
from hone.config import RLConfig, load_config
from hone.insight.metrics import GROUPS

FOLDER = Path(__file__).parents[3] / "docs" / "algorithms"
PAGES = sorted({method.page for method in methods()})


def test_pages_say_what_the_registries_say() -> None:
    stale = [
        name
        for name, text in algorithm_pages(FOLDER).items()
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != text
    ]
    assert not stale, "run scripts/make_docs"


def test_every_registered_name_has_a_page_and_every_page_a_method() -> None:
    named = {name for method in methods() for name in (method.name, *method.aliases)}
    registries = (algorithms.advantage_estimators, algorithms.policy_losses, algorithms.preference_losses)
    registered = {name for registry in registries for name in registry}
    kinds = {kind.removesuffix("+") for kind in algorithms.KL_KINDS}
    assert registered | kinds | set(algorithms.AGGREGATION_MODES) | set(algorithms.ROLLOUT_CORRECTION_PRESETS) <= named
    assert {path.name for path in FOLDER.glob("*.md")} == {*PAGES, "README.md"}


@pytest.mark.parametrize("page", PAGES)
def test_a_person_has_written_about_it(page: str) -> None:
    note = hand_written((FOLDER / page).read_text(encoding="utf-8"))
    assert TO_WRITE not in note and note.startswith("## When to use it and how it fails")
    assert len(note.split()) >= 60, "say when it is the right choice, how it fails, and what to look at"


@pytest.mark.parametrize("page", PAGES)
def test_metrics_named_in_the_notes_exist(page: str) -> None:
    known = [re.sub(r"<[^>]+>", "[^ ]+", re.escape(spec.name)) for specs in GROUPS.values() for spec in specs]
    tops = {name.partition("/")[0] for name in known}
    for word in re.findall(r"`([a-z_]+/[^`\s]+)`", hand_written((FOLDER / page).read_text(encoding="utf-8"))):
        if word.partition("/")[0] in tops:
            assert any(re.fullmatch(name.replace("\\<", "<"), word) for name in known), f"{page}: {word}"


def test_what_a_page_says_to_set_can_be_set() -> None:
    checked = 0
    for method in methods():
        settings = method.select.split(" (in the reward) or ")[0].split(" (")[0].split()
        if method.kind != "preference" and all(re.fullmatch(r"[a-z_]+(\.[a-z_]+)+=\S+", word) for word in settings):
            load_config(RLConfig, settings)
            checked += 1
    assert checked > 40


def test_writing_anew_keeps_what_people_wrote() -> None:
    page = splice("", "# new\n", "facts")
    assert page.startswith("# new") and TO_WRITE in page
    edited = page.replace(TO_WRITE, "It is good.").replace("# new", "# New")
    again = splice(edited, "# new\n", "other facts")
    assert again == edited.replace("facts", "other facts") and hand_written(again).endswith("It is good.")
    assert again.count(BEGIN) == again.count(END) == 1
