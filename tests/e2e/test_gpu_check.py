"""`scripts/gpu_check`: without a GPU every part says so, and on a CPU a part measures and judges."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.application("scripts", "benchmarks", "hone/models/kernels")

ROOT = Path(__file__).resolve().parents[2]


def gpu_check(out: Path, *words: str) -> tuple[int, dict[str, dict]]:
    """Exit code, and the result of each part."""
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(
        ["bash", ROOT / "scripts/gpu_check", "--out", out, *words], env=environment, capture_output=True, text=True
    )
    results = {result["part"]: result for result in json.loads((out / "results.json").read_text())}
    assert (out / "report.md").exists() and (out / "logs.tar.gz").exists(), ended.stderr
    return ended.returncode, results


def names_of(result: dict) -> dict[str, float]:
    return {value["name"]: value["value"] for value in result["values"]}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_every_part_says_so(tmp_path: Path) -> None:
    code, results = gpu_check(tmp_path)
    assert code == 0 and len(results) == 11
    assert {result["status"] for result in results.values()} == {"needs a GPU"}


@pytest.mark.long("benchmarks/gpu_check", "scripts/gpu_check")
def test_every_part_passes_on_a_cpu(tmp_path: Path) -> None:
    code, results = gpu_check(tmp_path, "--device", "cpu", "--patience", "20", "--deadline", "3000")
    assert code == 0, (tmp_path / "report.md").read_text()
    assert {result["status"] for result in results.values()} == {"passed"}
    engine = names_of(results["engine"])
    assert engine["float32: greedy responses equal to float64 transformers, of 8"] == 8
    assert 0 < engine["float32: log-probs against float64, largest"] < 1e-5
    assert 0 < names_of(results["programs"])["grpo_float32: largest error of gradient as a share of its bound"] <= 1
    assert 0 <= names_of(results["same"])["float32: K3 of engine and trainer"] < 1e-9


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_and_the_next_goes_on(tmp_path: Path) -> None:
    code, results = gpu_check(tmp_path, "--device", "cpu", "--parts", "programs", "sampler", "--patience", "0.01")
    assert code == 1 and results["programs"]["status"] == "failed" and "killed" in results["programs"]["problems"][0]
    assert results["sampler"]["problems"] or results["sampler"]["values"]


def test_values_are_on_disk_before_a_part_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # for this test: commands that others fork inherit the path
    from gpu_check.results import Result

    part = Result("decode", "cpu", tmp_path, ceilings={"copy": 3000.0})
    part.add("first", 1500.0, "GB/s", of="copy")
    part.add("second", 2.0, most=1.0)
    again = Result("decode", "cpu", tmp_path)
    again.read()
    assert [value.value for value in again.values] == [1500.0, 2.0] and again.status == "failed"
    assert "50% of what the device reaches" in again.values[0].line() and again.problems == [again.values[1].line()]
