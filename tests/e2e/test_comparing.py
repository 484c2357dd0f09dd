"""Comparisons on runs of the quickstart and of an agent example: twins, sweep, compare, bisect, note and sheet."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.forked_trials import fork_trials
from support.launch import Command, Ended, hone

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RATE = "actor_rollout_ref.actor.optim.lr"
MAKE = {
    "quickstart": ("arithmetic", "max_number=10"),
    "guess_the_number": ("environment:guess_the_number", "max_number=8", "guesses=3", "random_demonstrations=50"),
}
SHORT = (
    *("data.train_batch_size=4", "data.val_max_samples=4", "data.max_response_length=24", "trainer.test_freq=-1"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.optim.lr_warmup_steps=0"),
    *("actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=2", "trainer.num_threads=1", "trainer.device=cpu"),
    *("trainer.save_freq=0", "trainer.rollout_dump_freq=1", "trainer.logger=[]", "trainer.watchdog_seconds=0"),
)


@dataclass(frozen=True)
class Example:
    """A small form of an example: its file, and what its commands need besides."""

    root: Path
    file: Path
    words: tuple[str, ...]


@pytest.fixture(scope="module", params=sorted(MAKE))
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Example:
    root = tmp_path_factory.mktemp(request.param)
    for number, words in enumerate(
        [
            ("data", "make", *MAKE[request.param], "--out", root / "data", "--size", 24, "--val-size", 8),
            ("data", "tokenizer", "--files", root / "data/train.parquet", "--out", root / "tokenizer", "--vocab-size", 300,
             "--template", "chatml_tools"),
            ("init", "--arch", "qwen3", "--size", "200k", "--tokenizer", root / "tokenizer", "--out", root / "model"),
        ]
    ):  # fmt: skip
        ended = hone(*words, log=root / f"make{number}.log")
        assert ended.code == 0, ended.output
    data = (f"data.train_files={root}/data/train.parquet", f"data.val_files={root}/data/val.parquet")
    words = (*SHORT, *data, f"actor_rollout_ref.model.path={root}/model")
    return Example(root, EXAMPLES / request.param / "grpo.yaml", words)


@pytest.fixture(scope="module")
def runs(example: Example) -> Path:
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
