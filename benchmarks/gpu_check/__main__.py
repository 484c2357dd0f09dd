"""Run the check's parts, one after another, each in a fork with a limit of its own, and write a report.

Libraries are imported once, before the first fork; this process never touches the device. `scripts/gpu_check --help` says how to
start it.
"""

from __future__ import annotations

import os

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # asking for a GPU must not initialise CUDA before the forks

import argparse
import importlib
import json
import platform
import signal
import sys
import tarfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from gpu_check.results import Result

BEGAN = time.monotonic()
PARTS = {
    "ceilings": ("operators", 30),
    "attention": ("operators", 45),
    "engine": ("engine", 60),
    "kernels": ("operators", 90),
    "same": ("engine", 80),
    "programs": ("programs", 120),
    "sampler": ("operators", 30),
    "decode": ("speed", 170),
    "updates": ("speed", 150),
    "weights": ("weights", 80),
    "learning": ("programs", 100),
}
"""Module and seconds of each part, in order: what is likeliest to fail and tells most comes first."""
STARTS = 15
"""Seconds without which no part begins."""


def main() -> int:
    """Return 0 if no part failed, 1 if one did or did not run, 2 if a package is missing."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description="Check Hone on this machine's GPU, in parts."
    )
    parser.add_argument("--out", type=Path, default=Path("gpu_check_results"), help="folder of the results")
    parser.add_argument(
        "--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all, in this order"
    )
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the check itself, on tiny models"
    )
    parser.add_argument("--deadline", type=float, default=1200.0, help="seconds of all parts (default: %(default)g)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor of each part's limit, for a slow machine")
    options = parser.parse_args()
    work = options.out.resolve() / "parts"
    work.mkdir(parents=True, exist_ok=True)
    try:
        import torch

        from gpu_check import engine, operators, programs, speed, weights  # noqa: F401  once for all forks
        from hone.cli import main as commands  # noqa: F401
        from hone.trainers import rl, sft  # noqa: F401
    except ModuleNotFoundError as error:
        fix = "scripts/gpu_check --wheels DIR collects what is missing, on a machine with a network"
        print(f"{sys.executable}: {error}. Fix: {fix}", file=sys.stderr)
        return 2
    print(f"imports took {time.monotonic() - BEGAN:.0f} s", flush=True)
    warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")  # no thread holds a lock here
    usable, results = options.device == "cpu" or torch.cuda.is_available(), []
    for part in options.parts:
        result = Result(part, options.device, work)
        result.ceilings = {value.name: value.value for done in results[:1] for value in done.values}
        left = options.deadline - (time.monotonic() - BEGAN)
        if not usable:
            result.status = "needs a GPU"
        elif left < STARTS:
            result.status = "not run"
            result.notes.append(f"{left:.0f} of {options.deadline:g} s were left")
        else:
            _run(result, min(left, options.patience * PARTS[part][1]))
        result.write()
        results.append(result)
        _write(options.out.resolve(), results)
        print(f"{part}: {result.status} in {result.seconds:.0f} s", *result.problems, flush=True)
    with tarfile.open(options.out / "logs.tar.gz", "w:gz") as archive:
        archive.add(work, "parts")
    print((options.out / "report.md").read_text()[-8000:])
    return int(any(result.status in ("failed", "not run") for result in results))


def _run(result: Result, limit: float) -> None:
    """Run a part in a fork of this process; one that takes longer is killed with all it started."""
    began, child = time.monotonic(), os.fork()
    if child == 0:
        os.setsid()
        log = os.open(result.folder / f"{result.part}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        try:
            getattr(importlib.import_module(f"gpu_check.{PARTS[result.part][0]}"), result.part)(result)
        except BaseException as error:  # noqa: BLE001  whatever a part meets belongs in its result
            traceback.print_exc()
            result.problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
        result.write()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    status: int | None = None
    while status is None and time.monotonic() - began < limit:
        ended, raw = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(raw) if ended else None
        time.sleep(0.02)
    if status is None:
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
    result.read()
    if status != 0:
        result.problems.append(f"killed after {limit:.0f} s" if status is None else f"ended with exit code {status}")
    result.seconds = time.monotonic() - began


def _write(out: Path, results: Sequence[Result]) -> None:
    """Write results.json and report.md: versions, a line for each part, then what each measured."""
    (out / "results.json").write_text(json.dumps([result.as_json() for result in results], indent=1) + "\n")
    lines = ["# GPU check", "", _machine(), "", "| part | status | seconds |", "|---|---|---|"]
    lines += [f"| {result.part} | {result.status} | {result.seconds:.0f} |" for result in results]
    for result in results:
        lines += result.lines()
    (out / "report.md").write_text("\n".join(lines) + "\n")


def _machine() -> str:
    import torch
    import transformers

    gpu = "no GPU"
    if torch.cuda.is_available():  # not by torch, which would initialise CUDA here
        names = os.popen("nvidia-smi --query-gpu=name --format=csv,noheader").read().strip().splitlines()
        gpu = names[0] if names else "a GPU"
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{gpu}, {os.cpu_count()} cores, {versions}; {time.monotonic() - BEGAN:.0f} s so far"


if __name__ == "__main__":
    sys.exit(main())
