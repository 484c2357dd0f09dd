"""Run the check's parts, each in a process of its own with a time limit, and write a report.

`scripts/gpu_check --help` says how; this module is what it starts.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from gpu_check.results import Result, read_result

PARTS = {
    "smoke": "gpu_check.programs",
    "engine": "gpu_check.kernels",
    "oracle": "gpu_check.programs",
    "updates": "gpu_check.kernels",
    "decoding": "gpu_check.kernels",
    "memory": "gpu_check.programs",
    "weights": "gpu_check.weights",
    "ipc": "gpu_check.weights",
    "learning": "gpu_check.programs",
}
"""The module of each part, in which a function has the part's name."""
LIMIT = 9 * 60
"""Seconds of a part."""


def main() -> int:
    """Return 0 if every part passed or found no GPU, 1 if one failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description="Check Hone on this machine's GPU, in parts."
    )
    parser.add_argument(
        "--out", type=Path, default=Path("gpu_check_results"), help="folder for JSON, logs and report.md"
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="default: all")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the script itself, on tiny models"
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds of a part (default: %(default)s)")
    parser.add_argument("--one", choices=list(PARTS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.one:
        return _run_here(options.one, options.device, options.out)
    usable = options.device == "cpu" or _has_gpu()
    results = [_run(part, options.device, options.out, options.limit, usable=usable) for part in options.parts]
    report = _report(results)
    (options.out / "report.md").write_text(report)
    print(f"\n{report}\nThe report, JSON and logs are in {options.out}.")
    return int(any(result.status in ("failed", "not run") for result in results))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _run(part: str, device: str, out: Path, limit: float, *, usable: bool) -> Result:
    """Run a part in a process of its own."""
    if not usable:
        result = Result(part, device, "no GPU")
        result.write(out)
        print(f"{part}: no GPU", flush=True)
        return result
    (out / f"{part}.json").unlink(missing_ok=True)
    print(f"{part} ...", end=" ", flush=True)
    began = time.monotonic()
    command = [sys.executable, "-m", "gpu_check", "--one", part, "--device", device, "--out", str(out)]
    with (out / f"{part}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(limit)
            why = f"ended with exit code {process.returncode} and no result; see {part}.log"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            why = f"took longer than {limit:g} s; see {part}.log"
    result = read_result(out, part) or Result(part, device, problems=[why])
    result.seconds = time.monotonic() - began
    result.write(out)
    print(f"{result.status} in {result.seconds:.0f} s", flush=True)
    return result


def _run_here(part: str, device: str, out: Path) -> int:
    """Run a part in this process."""
    import tempfile

    result = Result(part, device)
    with tempfile.TemporaryDirectory(prefix=f"gpu_check_{part}_") as folder:
        try:
            getattr(importlib.import_module(PARTS[part]), part)(result, Path(folder))
        except Exception as error:  # noqa: BLE001  whatever a part meets belongs in its result
            traceback.print_exc()
            result.problems.append(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    result.write(out)
    return int(bool(result.problems))


def _report(results: Sequence[Result]) -> str:
    """Return the report: versions, a line for each part, then what each measured."""
    lines = ["# GPU check", "", _machine(), "", "| part | status | seconds |", "|---|---|---|"]
    lines += [f"| {result.part} | {result.status} | {result.seconds:.0f} |" for result in results]
    for result in results:
        details = [*(f"problem: {problem}" for problem in result.problems)]
        details += [value.line() for value in result.values if value.passed]
        details += [f"note: {note}" for note in result.notes]
        if details:
            lines += ["", f"## {result.part}", "", *(f"- {detail}" for detail in details)]
    return "\n".join(lines) + "\n"


def _machine() -> str:
    import torch
    import transformers

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return f"{gpu}, Python {platform.python_version()}, torch {torch.__version__}{cuda}, transformers {transformers.__version__}"


if __name__ == "__main__":
    sys.exit(main())
