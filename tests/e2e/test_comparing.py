"""Comparisons on runs of the quickstart and of an agent example: twins, sweep, compare, bisect, note and sheet."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forked_trials import fork_trials
from support.launch import Command, Ended
from support.small_examples import NAMES, SmallExample, small_example

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application(
        "hone/insight",
        "hone/apps/lab",
        "hone/cli/trials.py",
        "hone/cli/runs.py",
        "examples",
    ),
]

RATE = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module", params=NAMES)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallExample:
    return small_example(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def runs(example: SmallExample) -> Path:
    """Equal twins in `twins/seed_1`, and two learning rates in `sweep/000` and `sweep/001`."""
    root = example.root
    words = ("twins", example.file, example.file, *example.words, "--out", "twins", "--json")
    result = parsed(start(root, *words))
    assert result["decision"] == {"outcome": "no difference", "confidence": 1.0, "pairs": 1, "difference": 0.0}
    assert result["pairs"][0]["prompts"] == 4 and result["pairs"][0]["identical"]
    place = ("--config-path", example.file.parent, "--config-name", "grpo")
    result = parsed(start(root, "sweep", *place, *example.words, f"{RATE}=1e-3,1e-2", "--out", "sweep", "--json"))
    assert sorted(trial["values"][RATE] for trial in result["trials"]) == ["0.001", "0.01"]
    assert all(trial["status"] == "finished" and trial["score"] is not None for trial in result["trials"])
    assert (root / "sweep/sweep.png").read_bytes().startswith(b"\x89PNG")
    return root


def start(root: Path, *words: object) -> Ended:
    ended = Command(words, root / f"{words[0]}.log", root, prepare=fork_trials).wait()
    assert ended.code == 0, ended.output
    return ended


def parsed(ended: Ended) -> dict[str, Any]:
    """The JSON of a command, after its progress lines."""
    return json.loads(ended.output[ended.output.index("\n{") if not ended.output.startswith("{") else 0 :])


def test_equal_twins_have_no_first_difference(runs: Path, run: Callable[..., Ended]) -> None:
    result = parsed(run("runs", "bisect", runs / "twins/seed_1/first", runs / "twins/seed_1/second", "--json"))
    assert result["first"] is None and result["with_samples"] == 2
    result = parsed(run("runs", "compare", runs / "twins/seed_1/first", runs / "twins/seed_1/second", "--json"))
    (item,) = result["confidence"]
    assert item["result"]["verdict"] == "within noise" and item["result"]["difference"] == 0


def test_two_learning_rates_differ_first_after_an_update(runs: Path, run: Callable[..., Ended]) -> None:
    result = parsed(run("runs", "bisect", runs / "sweep/000", runs / "sweep/001", "--json"))
    assert (result["first"]["stage"], result["first"]["what"]) == ("config", RATE)
    assert result["observed"]["stage"] in ("loss", "weights", "tokens") and RATE in result["cause"]
    result = parsed(run("runs", "compare", runs / "sweep/000", runs / "sweep/001", "--json"))
    (item,) = result["confidence"]
    assert (item["result"]["seeds"], item["result"]["prompts"], item["paired_by_seed"]) == (1, 4, True)


def test_a_sheet_has_difference_curve_notes_and_verdict(runs: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    assert run("runs", "note", runs / "sweep/001", "a faster rate").code == 0
    page = tmp_path / "sheet.md"
    ended = run("runs", "sheet", runs / "sweep/001", "--base", runs / "sweep/000", "--out", page)
    assert ended.code == 0, ended.output
    text = page.read_text()
    assert f"| {RATE} | `0.001` | `0.01` |" in text and "a faster rate" in text and "┤" in text
    assert text.count("\n## ") == 4 and "One seed" in text
