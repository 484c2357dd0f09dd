"""The audit log: its chain, what it hides, and calls that cannot be recorded."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from support.messages import raises

from hone.errors import HoneError
from hone.insight.audit import AuditLog, read_audit


def written(folder: Path) -> list[str]:
    log = AuditLog(folder)
    for number in range(3):
        call = log.begin("search", {"query": f"q{number}", "api_key": "open sesame"}, episode="0#1")
        log.end(call, "ok", "a result", 0.5)
    return log.path.read_text().splitlines(keepends=True)


def problems(folder: Path) -> list[int]:
    return [line.number for line in read_audit(folder) if line.problem]


def test_lines_have_calls_and_their_ends_without_secrets_and_results(tmp_path: Path) -> None:
    records = [json.loads(line) for line in written(tmp_path)]
    assert [(record["event"], record["call"]) for record in records] == [
        (event, call) for call in (1, 2, 3) for event in ("call", "end")
    ]
    assert records[0]["arguments"]["query"] == "q0" and "sesame" not in json.dumps(records)
    assert "a result" not in json.dumps(records) and records[1]["characters"] == 8
    assert problems(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        (lambda lines: [lines[0].replace("q0", "q9"), *lines[1:]], [2]),
        (lambda lines: lines[:2] + lines[3:], [3, 5]),
        (lambda lines: lines[1:], [1, 5]),
        (lambda lines: [lines[0], lines[0], *lines[1:]], [2, 7]),
        (lambda lines: [lines[1], lines[0], *lines[2:]], [1, 2, 3]),
        (lambda lines: [*lines, "{}\n"], [7]),
        (lambda lines: [*lines, "half"], [7]),
        (lambda lines: lines[:4], [4]),
        (lambda lines: [], [0]),
        (lambda lines: [*lines[:5], lines[5].replace("ok", "no")], [6]),
    ],
)
def test_changes_break_the_chain(change: object, broken: list[int], tmp_path: Path) -> None:
    lines = written(tmp_path)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text("".join(change(lines)))  # type: ignore[operator]
    assert problems(tmp_path) == broken


@pytest.mark.parametrize("removed", ["*.jsonl", "*.head", "files"])
def test_a_removed_file_is_a_problem(removed: str, tmp_path: Path) -> None:
    written(tmp_path)
    (file,) = tmp_path.glob(removed)
    AuditLog(tmp_path).begin("search", {})
    assert problems(tmp_path) == []
    file.unlink()
    assert len(problems(tmp_path)) == 1


def test_a_kill_between_a_line_and_its_head_is_no_problem(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)
    log.begin("search", {})
    before = log.path.with_suffix(".head").read_text()
    log.begin("search", {})
    log.path.with_suffix(".head").write_text(before)
    assert problems(tmp_path) == []


def test_threads_share_one_chain(tmp_path: Path) -> None:
    log = AuditLog(tmp_path)

    def write() -> None:
        for _ in range(50):
            log.end(log.begin("tool", {}), "ok", "", 0.0)

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = list(read_audit(tmp_path))
    assert len(lines) == 800 and not any(line.problem for line in lines)
    assert sorted(line.record["call"] for line in lines if line.record["event"] == "call") == list(range(1, 401))


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with raises(HoneError, "recorded"):
        AuditLog(tmp_path / "file")
    with raises(HoneError, "no audit log"):
        list(read_audit(tmp_path))
