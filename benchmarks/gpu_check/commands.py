"""Hone's commands, as a user types them, and what their runs recorded."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check.results import Result

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"


class CommandFailed(RuntimeError):
    """A command ended with another exit code than 0."""


def hone(*words: object, accepted: Sequence[int] = (0,)) -> str:
    """Run `hone WORDS` and return what it printed on stdout; the rest is in the part's log.

    Raises:
        CommandFailed: its exit code is not among the accepted ones.
    """
    command = [str(word) for word in words]
    print("$ hone " + " ".join(command), file=sys.stderr, flush=True)
    ended = subprocess.run([sys.executable, "-m", "hone.cli.main", *command], stdout=subprocess.PIPE, text=True)
    print(ended.stdout[-4000:], file=sys.stderr, flush=True)
    if ended.returncode not in accepted:
        raise CommandFailed(f"`hone {' '.join(command[:2])}` ended with exit code {ended.returncode}")
    return ended.stdout


def rows_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_run(result: Result, name: str, run: Path, steps: int) -> list[dict[str, Any]]:
    """Check that a run finished with finite metrics and, on a GPU, used its memory; return the rows."""
    record, rows = json.loads((run / "run.json").read_text()), rows_of(run)
    if record["status"] != "finished" or rows[-1]["step"] != steps:
        result.problems.append(f"{name}: {record['status']} at step {rows[-1]['step']} of {steps}")
    broken = {
        key for row in rows for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)
    }
    if broken:
        result.problems.append(f"{name}: not finite: {', '.join(sorted(broken))}")
    if result.device != "cpu":
        memory = max(row.get("perf/max_memory_allocated_gb", 0.0) for row in rows)
        result.add(f"{name}: peak GPU memory", memory, "GB", least=1e-3)
    return rows


def small_task(folder: Path, *, rows: int = 2000) -> Path:
    """Make arithmetic problems, a tokenizer and a model of a million random weights; return the folder."""
    hone("data", "make", "arithmetic", "max_number=20", "--out", folder / "data", "--size", rows, "--val-size", 64)
    hone(
        "data",
        "tokenizer",
        "--files",
        folder / "data/train.parquet",
        "--out",
        folder / "tokenizer",
        "--vocab-size",
        512,
    )
    hone("init", "--arch", "qwen3", "--size", "1m", "--tokenizer", folder / "tokenizer", "--out", folder / "model")
    return folder


def data_keys(folder: Path) -> list[str]:
    """Return the keys of a task's data files."""
    return [f"data.train_files={folder}/data/train.parquet", f"data.val_files={folder}/data/val.parquet"]
