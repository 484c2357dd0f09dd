"""`hone gate` on real models: what passes, what is refused, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.launch import hone
from support.tiny_runs import make_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.application("hone/apps/ops", "hone/cli/release.py", "hone/trainers/evaluation.py"),
]

REWARD = '''
def even(solution_str, ground_truth, **row):
    """1 for rows with an even answer."""
    return float(int(ground_truth) % 2 == 0)

def fails(solution_str, ground_truth, **row):
    if int(ground_truth) % 4 == 0:
        raise RuntimeError("the judge is away")
    return 1.0

def letters(solution_str, **row):
    return len(solution_str) / 100
'''


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    make_model(folder / "model")
    make_model(folder / "other", layers=1)
    (folder / "scores.py").write_text(REWARD)
    for name, answers in (("even", range(0, 40, 2)), ("all", range(20))):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"question {answer}"}],
                "data_source": "numbers",
                "reward_model": {"ground_truth": str(answer)},
            }
            for answer in answers
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def gate(work: Path, log: Path, checks: str, *words: str) -> tuple[int, dict[str, Any], str]:
    (log / "suite").mkdir()
    suite = work / f"{log.name}.yaml"
    suite.write_text(checks)
    report = log / "report.json"
    ended = hone(
        "gate", f"{work}/model", "--suite", str(suite), "--output", str(report), *words, log=log / "log", cwd=work
    )
    return ended.code, json.loads(report.read_text()) if report.is_file() else {}, ended.output


SHORT = "max_response_length: 4"


def test_conditions_that_hold_pass(work: Path, tmp_path: Path) -> None:
    checks = f"""
checks:
  canaries: {{data: even.jsonl, reward: 'scores.py:even', every: true, at_least: 0.83, {SHORT}}}
  half: {{data: all.jsonl, reward: 'scores.py:even', at_least: 0.29, no_worse_by: 0.0, {SHORT}}}
  rates: {{data: all.jsonl, reward: 'scores.py:even', metrics: {{val-aux/no_verdict_rate: {{at_most: 0}}}}, {SHORT}}}
"""
    code, report, output = gate(work, tmp_path, checks, "--against", f"{work}/other")
    assert code == 0 and report["passed"], output
    measured = {(one["check"], one["name"]): one["measured"] for one in report["conditions"]}
    assert measured["canaries", "every"] == 1 and measured["half", "no_worse_by"] == 0
    assert measured["canaries", "at_least"] == pytest.approx(0.8389, abs=1e-4)
    assert measured["half", "at_least"] == pytest.approx(0.2993, abs=1e-4)
    assert {Path(file).name for file in report["data"]} == {"even.jsonl", "all.jsonl"}
    assert all(len(digest) == 64 for digest in report["data"].values())


def test_each_condition_that_fails_refuses(work: Path, tmp_path: Path) -> None:
    checks = f"""
checks:
  canaries: {{data: all.jsonl, reward: 'scores.py:even', every: true, {SHORT}}}
  sure: {{data: all.jsonl, reward: 'scores.py:even', at_least: 0.45, {SHORT}}}
  away: {{data: all.jsonl, reward: 'scores.py:fails', at_least: 0.0, {SHORT}}}
  unknown: {{data: all.jsonl, reward: 'scores.py:even', metrics: {{tool/error_rate: {{at_most: 1}}}}, {SHORT}}}
  worse: {{data: all.jsonl, reward: 'scores.py:letters', no_worse_by: 0.0, {SHORT}}}
"""
    code, report, output = gate(work, tmp_path, checks, "--against", f"{work}/other")
    assert code == 4 and not report["passed"], output
    refused = {(one["check"], one["name"]) for one in report["conditions"] if not one["passed"]}
    assert refused >= {
        ("canaries", "every"),
        ("sure", "at_least"),
        ("away", "verdicts"),
        ("unknown", "tool/error_rate"),
    }


def test_a_comparison_without_a_released_model_is_a_mistake(work: Path, tmp_path: Path) -> None:
    code, _, output = gate(work, tmp_path, f"checks: {{one: {{data: all.jsonl, no_worse_by: 0.1, {SHORT}}}}}")
    assert code == 2 and "--against" in output
