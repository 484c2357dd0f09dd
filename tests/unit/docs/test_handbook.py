"""The handbook: numbers of its tables are those of the functions, and its lists name what exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.worked_batch import TABLES, advantages, concepts_page

from hone.apps.explain.catalogue import methods, papers_page
from hone.apps.explain.catalogue.pages import SYSTEMS, file_of
from hone.config import RLConfig, documentation, load_config
from hone.insight.detectors import DETECTORS
from hone.insight.metrics import METRICS
from hone.trainers.algorithm import mini_batches

HANDBOOK = Path(__file__).resolve().parents[3] / "docs" / "handbook"


def text(page: str) -> str:
    return (HANDBOOK / page).read_text(encoding="utf-8")


def test_the_numbers_of_the_worked_batch_are_computed() -> None:
    page = text("concepts.md")
    assert page == concepts_page(page), "run scripts/make_docs"
    assert page.count("|---|") + page.count("| --- |") > len(TABLES)
    grpo = advantages("grpo")
    assert abs(float(grpo[:4, 0].sum())) < 1e-5 and float(grpo[0, 0]) == pytest.approx(
        1.5, abs=1e-4
    )  # by hand: 0.75 / 0.5


def test_updates_of_the_page_are_those_of_a_run() -> None:
    sizes = [
        "data.train_batch_size=256",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    ]
    assert all(size in text("concepts.md") for size in sizes)
    config = load_config(RLConfig, sizes)
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini = config.actor_rollout_ref.actor.ppo_mini_batch_size
    groups = [str(row // n) for row in range(prompts * n)]
    updates = mini_batches(groups, mini, config.actor_rollout_ref.actor.ppo_epochs, seed=None)
    batches = list(updates)
    assert f"{prompts} prompts with n = {n} are {prompts * n} responses" in text("concepts.md")
    assert f"{prompts} / {mini} = {len(batches)} updates" in text("concepts.md") and len(batches) == 4


@pytest.mark.parametrize("page", sorted(path.name for path in HANDBOOK.glob("*.md")))
def test_a_page_begins_with_what_its_reader_can_do_after_it(page: str) -> None:
    paragraphs = [part for part in text(page).split("\n\n")[1:] if not part.startswith("<!--")]
    assert paragraphs[0].startswith("After this page you can ")


def test_the_index_of_papers_is_that_of_the_registries() -> None:
    page = papers_page()
    assert page == text("papers.md"), "run scripts/make_docs"
    root = HANDBOOK.parents[1]
    for method in methods():
        if method.kind != "correction":
            file = root / file_of(method)
            assert f"[{method.name}](" in page and file.is_file(), method.name
            assert (root / "docs" / "algorithms" / method.page).is_file()
    keys = {key.path for key in documentation(RLConfig)} | {"trainer.runtime"}
    assert all((root / file).exists() and key in keys for _, _, _, file, key in SYSTEMS)


def test_the_comparison_counts_the_methods_of_the_registries() -> None:
    kinds = [method.kind for method in methods()]
    counted = f"{kinds.count('estimator')} estimators, {kinds.count('loss')} policy losses, {kinds.count('preference')} preference losses"
    assert counted in text("comparison.md") and "November 2026" in text("comparison.md")


def test_the_playbook_names_detectors_and_metrics_that_exist() -> None:
    page = text("playbook.md")
    named = {word for row in re.findall(r"detectors? (`[^|]+)", page) for word in re.findall(r"`([a-z_]+)`", row)}
    assert len(named) >= 9 and named <= {detector.name for detector in DETECTORS}
    known = [re.sub(r"<[^>]+>", "[^ ]+", re.escape(spec.name)) for spec in METRICS]
    for name in ("playbook.md", "concepts.md", "planning.md", "scaling.md"):
        for word in re.findall(r"`([a-z_-]+/[^`\s]+)`", text(name)):
            if word.partition("/")[0] in {spec.name.partition("/")[0] for spec in METRICS}:
                assert any(re.fullmatch(pattern, word) for pattern in known), f"{name}: {word}"
