"""`scripts/gpu_check`: without a GPU every part says so, and on a CPU a part measures and judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"smoke", "engine", "oracle", "updates", "decoding", "memory", "weights", "ipc", "learning"}


def gpu_check(out: Path, *words: str) -> tuple[int, dict[str, dict]]:
    """Exit code, and the result of each part."""
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(
        ["bash", ROOT / "scripts/gpu_check", "--out", out, *words], env=environment, capture_output=True, text=True
    )
    return ended.returncode, {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_part_says_so(tmp_path: Path) -> None:
    code, results = gpu_check(tmp_path)
    assert code == 0 and set(results) == PARTS
    assert {result["status"] for result in results.values()} == {"no GPU"}
    report = (tmp_path / "report.md").read_text()
    assert all(f"| {part} | no GPU |" in report for part in PARTS)


@pytest.mark.long("benchmarks/gpu_check", "scripts/gpu_check")
def test_a_part_measures_judges_and_reports(tmp_path: Path) -> None:
    code, results = gpu_check(tmp_path, "--device", "cpu", "--parts", "engine", "oracle")
    assert code == 0, (tmp_path / "report.md").read_text()
    values = {value["name"]: value["value"] for result in results.values() for value in result["values"]}
    assert values["float32: greedy responses equal to float64 transformers, of 8"] == 8
    assert 0 < values["float32: log-probs against float64, largest"] < 1e-5
    assert 0 < values["float32: largest error of gradient as a share of its bound"] <= 1


@pytest.mark.slow
def test_a_part_that_takes_too_long_fails(tmp_path: Path) -> None:
    code, results = gpu_check(tmp_path, "--device", "cpu", "--parts", "engine", "--limit", "0.5")
    assert code == 1 and results["engine"]["status"] == "failed" and results["engine"]["problems"]
