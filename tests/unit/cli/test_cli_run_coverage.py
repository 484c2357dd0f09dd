"""`hone runs coverage` and `Run.coverage()`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import Result
from support.coverage_runs import invented, write_run
from typer.testing import CliRunner

import hone
from hone.cli.runs import app
from hone.errors import HoneError
from hone.insight.run_directory import RunDirectory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    draws = invented(
        0, lambda random, draw: "too_old" if draw.tokens > 110 and random.random() < 0.6 else None, epochs=2
    )
    write_run(tmp_path / "hone/fast", draws)
    return tmp_path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["coverage", *map(str, arguments)], env={"COLUMNS": "100"}, catch_exceptions=False)


def test_table_and_picture(root: Path, tmp_path: Path) -> None:
    png = tmp_path / "made" / "coverage.png"
    result = invoke("fast", "--root", root, "--png", png)
    assert result.exit_code == 0 and png.read_bytes().startswith(b"\x89PNG")
    counts = json.loads(invoke("fast", "--root", root, "--json").stdout)["counts"]
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["all", "600", str(counts["trained"]), str(counts["too_old"])] in rows
    assert "Cliff" in result.stdout


def test_json_is_what_the_api_returns(root: Path) -> None:
    result = invoke(root / "hone/fast", "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0 and report.pop("png") is None
    assert report == hone.Run(root / "hone/fast").coverage()
    assert [c["characteristic"] for c in report["bias"]["comparisons"] if c["biased"]] == ["tokens"]


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_contradiction_is_exit_code_1(root: Path, options: list[str]) -> None:
    file = root / "hone/fast/coverage.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    result = invoke("fast", "--root", root, *options)
    assert result.exit_code == 1 and "step 1" in result.stderr
    if options:
        assert "step 1" in json.loads(result.stdout)["problem"]


def test_brackets_in_a_reason_are_shown(tmp_path: Path) -> None:
    from support.coverage_runs import changed

    draws = [changed(draw, "failed", "[bold]KeyError[/]") for draw in invented(0, lambda random, draw: None, rows=3)]
    write_run(tmp_path / "run", draws)
    result = invoke(tmp_path / "run", "--png", tmp_path / "no_trained.png")
    assert result.exit_code == 0 and "[bold]KeyError[/]" in result.stdout


def test_a_run_without_the_record(tmp_path: Path) -> None:
    RunDirectory(tmp_path / "old").start(seed=1, config_yaml="{}", command=["hone", "train"])
    with pytest.raises(HoneError) as caught:
        invoke(tmp_path / "old")
    assert caught.value.code == "E-runs"
