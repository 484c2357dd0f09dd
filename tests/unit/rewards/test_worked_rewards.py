"""The ten worked rewards of examples/rewards pay right answers, and no answer that games them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.application("examples/rewards", "hone/rewards")

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "rewards"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "traces")


@pytest.fixture(scope="module")
def traces() -> ModuleType:
    spec = importlib.util.spec_from_file_location("traces", FOLDER / "traces.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_are_ten_each_with_traces_and_a_line_of_the_page(traces: ModuleType) -> None:
    assert len(NAMES) == 10 and sorted(traces.TRACES) == NAMES
    listed = re.findall(r"^\| \[`(\w+)\.py`\]", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert sorted(listed) == NAMES
    for truth, right, _, traps in traces.TRACES.values():
        assert truth and right and len(traps) >= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_reward_pays_right_answers_and_no_traps(name: str, traces: ModuleType) -> None:
    assert traces.faults(name) == []


def test_traces_find_a_reward_that_is_gamed(traces: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "load", lambda name: lambda source, text, truth, extra: {"score": float(truth in text)})
    assert any("trap" in fault for fault in traces.faults("numeric") + traces.faults("strict_flexible"))


def test_costs_and_lengths_lower_right_answers_only(traces: ModuleType) -> None:
    efficient, overlong, weighted = (traces.load(name) for name in ("efficient", "overlong", "weighted"))
    calls = {"episode": {"tool_calls": [{}] * 4, "tokens": {"given": 100}}}
    assert traces.score(efficient, "9", "#### 9", calls) == pytest.approx(0.7)
    assert traces.score(efficient, "9", "#### 9", {"episode": {"tool_calls": [{}] * 99}}) == 0.5
    assert traces.score(efficient, "9", "#### 8", {}) == 0
    assert traces.score(overlong, "9", "word " * 38 + "#### 9") == pytest.approx(0.75)
    assert traces.score(overlong, "9", "word " * 99 + "#### 9") == 0.5
    wrong, right = "<think>x</think> #### 8", "y" * 300 + " #### 9"
    assert traces.score(weighted, "9", wrong) < traces.score(weighted, "9", right)
