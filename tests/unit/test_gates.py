"""Suites of checks, and the intervals of their conditions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from hone.apps.ops.gate import Bounds, lower_end, lower_end_of_difference, read_suite
from hone.errors import ConfigError


def suite(folder: Path, text: str) -> Any:
    (folder / "suite.yaml").write_text(text)
    return read_suite(folder / "suite.yaml")


def test_a_suite_is_read_with_paths_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_text("")
    (tmp_path / "safety.py").write_text("")
    (check,) = suite(
        tmp_path,
        "checks: {one: {data: val.jsonl, at_least: 0.5, reward: 'safety.py:score', metrics: {tool/error_rate: {at_most: 0.1}}}}",
    )
    assert check.data == (str(tmp_path / "val.jsonl"),) and check.reward == f"{tmp_path}/safety.py:score"
    assert check.metrics == {"tool/error_rate": Bounds(None, 0.1)} and check.at_least == 0.5


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checks: {}", "no checks"),
        ("other: 1", "no checks"),
        ("checks: {one: 3}", "checks.one"),
        ("checks: {one: {at_least: 0.5}}", "no data"),
        ("checks: {one: {data: a}}", "no condition"),
        ("checks: {one: {data: a, atleast: 0.5}}", "'atleast'"),
        ("checks: {one: {data: a, at_least: high}}", "'high'"),
        ("checks: {one: {data: a, every: 1}}", "every is 1"),
        ("checks: {one: {data: a, n: true, every: true}}", "n is True"),
        ("checks: {one: {data: a, metrics: {m: 0.5}}}", "metrics.m"),
        ("checks: {one: {data: a, metrics: {m: {below: 0.5}}}}", "metrics.m"),
    ],
)
def test_a_wrong_suite_is_one_message(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        suite(tmp_path, text)
    assert says in str(caught.value)


def test_shares_have_wilsons_interval() -> None:
    assert lower_end([1.0] * 73) == pytest.approx(0.95, abs=1e-4)
    assert lower_end([1.0] * 10) == pytest.approx(0.7225, abs=1e-4)
    assert lower_end([1.0, 0.0] * 50) == pytest.approx(0.4038, abs=1e-4)
    assert lower_end([0.0] * 20) == pytest.approx(0.0, abs=1e-9)
    assert math.isnan(lower_end([]))


def test_other_scores_and_differences_have_a_bootstrap_interval() -> None:
    scores = [0.5, 0.7] * 50
    spread = 0.1 / math.sqrt(99) * 1.984
    assert lower_end(scores) == pytest.approx(0.6 - spread, rel=0.02)
    assert lower_end_of_difference([0.1, -0.1] * 50) == pytest.approx(-spread, rel=0.1)
    assert lower_end_of_difference([0.0] * 5) == 0
    assert math.isnan(lower_end_of_difference([0.3]))
