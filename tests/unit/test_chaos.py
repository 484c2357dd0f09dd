"""`scripts/chaos` sees what is lost, doubled or different."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from collections import Counter
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from support.slow_loop import PROMPTS

STEPS = 3


@pytest.fixture(scope="module")
def chaos() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "chaos"
    loader = SourceFileLoader("chaos", str(path))
    spec = importlib.util.spec_from_loader("chaos", loader)
    assert spec is not None
    module = sys.modules["chaos"] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def write(run: Path, losses: list[float], draws: list[int] | None) -> Path:
    run.mkdir()
    steps = {2.2: 2}  # a step that has two lines
    rows = [{"step": steps.get(loss, int(loss)), "loss": loss, "timing_s/step": random.random()} for loss in losses]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if draws is not None:
        lines = [json.dumps({"draw": draw, "fate": "trained"}) + "\n" for draw in draws]
        (run / "coverage.jsonl").write_text("".join(lines))
    return run


ALL = list(range(STEPS * PROMPTS))


@pytest.mark.parametrize(
    ("losses", "draws", "found"),
    [
        ([1.0, 2.0, 3.0], ALL, (0, 0, [])),
        ([1.0, 2.5, 3.0], ALL, (0, 0, ["loss of step 2"])),
        ([1.0, 2.0, 3.0], [*ALL[1:], 5], (1, 1, [])),
        ([1.0, 2.0], None, (1, 0, [])),
        ([1.0, 2.2, 2.0, 3.0], None, (0, 1, [])),
    ],
)
def test_what_the_table_counts(
    chaos: ModuleType, tmp_path: Path, losses: list[float], draws: list[int] | None, found: tuple[int, int, list[str]]
) -> None:
    story = chaos.Story("sync")
    twin = write(tmp_path / "twin", [1.0, 2.0, 3.0], None if draws is None else ALL)
    chaos.compare(story, write(tmp_path / "run", losses, draws), twin, STEPS)
    assert (story.lost, story.doubled, story.differing) == found


def test_a_third_of_the_kills_of_an_asynchronous_run_are_of_engines(chaos: ModuleType) -> None:
    faults = {one: Counter(chaos.schedule(one, 15, random.Random(1), disk=False)) for one in ("sync", "async")}
    assert faults["sync"] == {"kill": 15, "stop": 3, "clock": 3}
    assert faults["async"] == {"kill": 10, "child": 5, "stop": 3, "clock": 3}
