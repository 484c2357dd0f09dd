"""Run the tests in stages: scripts/test, which starts this with the project's Python.

Every stage runs, also after one that failed; a summary ends the run. A stage holds the tests with its markers, less those that
`tests/support/choice.py` leaves out because nothing changed that they are about.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
NO_TESTS = 5
"""Exit code of pytest that ran no test."""
STAGES = {
    "short": "not long and not learn and not simulated_cuda and not engines",
    "simulated": "simulated_cuda and not engines",
    "long": "long and not alone and not engines",
    "learn": "learn",
    "alone": "alone",
}
"""The markers of each stage."""
SHORT = ("short",)
"""The stages of a bare `scripts/test`: fast tests, and slow ones that train and resume."""
MARKERS = {**STAGES, "fast": f"not slow and {STAGES['short']}"}
VLLM = (
    "vllm and (engine_conformance or pretrained or judging) and not (crash or untied or divided or drafted or copies)"
)
"""Tests of vLLM that need one start of the engine."""
ABOUT_VLLM = ("hone/generation/", "tests/integration/engine_conformance.py", "constraints.txt")


class Ended(NamedTuple):
    """How a stage ended: its exit code, what pytest said of it last, and its seconds."""

    stage: str
    code: int
    said: str
    seconds: float


def options() -> tuple[argparse.Namespace, list[str]]:
    """Return the options and the arguments for pytest."""
    parser = argparse.ArgumentParser(prog="scripts/test", allow_abbrev=False, description=__doc__)
    parser.add_argument("--all", action="store_true", help="every stage, with all examples of property tests")
    parser.add_argument("--changed", nargs="?", const="", metavar="REF",
                        help="also the long tests about what changed since REF (the branch that this one left)")  # fmt: skip
    parser.add_argument(
        "--part", metavar="K/N", help="part of the long tests; with --changed, of those that are about something else"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="of the long stages together, after which no further of their tests begins",
    )
    parser.add_argument(
        "--unit", action="store_true", help="unit tests without the slow ones, those that failed last first"
    )
    parser.add_argument("--random", action="store_true", help="property tests with new examples")
    return parser.parse_known_args()


def changed_since(ref: str) -> list[str]:
    """Return the paths that differ from a revision: committed, not committed, and new. "" means where this branch left its remote one."""
    if not ref:
        base = subprocess.run(["git", "merge-base", "HEAD", "@{upstream}"], cwd=ROOT, capture_output=True, text=True)
        ref = base.stdout.strip() if base.returncode == 0 else "HEAD"
    try:
        paths = _git("diff", "--name-only", ref) + _git("ls-files", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"git does not say what changed since {ref!r}: {getattr(error, 'stderr', error)}") from error
    return sorted(set(paths))


def _git(*words: str) -> list[str]:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    return ended.stdout.splitlines()


def run(stage: str, choice: Sequence[str], words: Sequence[str]) -> Ended:
    """Run the tests of a stage on all cores, or one at a time, and print what pytest prints."""
    alone = stage == "alone"
    command = [sys.executable, "-m", "pytest", "-m", MARKERS[stage], "-n", "1" if alone else "auto", "--maxprocesses", "4",
               "--dist", "worksteal", "--durations=15", *choice, *words]  # fmt: skip
    if not words and stage not in SHORT:  # read only the files that have its mark
        own = rf"mark\.{STAGES[stage].split()[0]}\b"
        command += [str(path) for path in sorted((ROOT / "tests").rglob("*.py")) if re.search(own, path.read_text())]
    return _followed(stage, command)


def run_vllm() -> Ended:
    """Run vLLM's conformance with one start of the engine, in an environment that is made once and kept (docs/engines.md has its size).

    Without a network it cannot be made: then the stage is left out, unless HONE_TEST_ENGINES=1 makes that an error; 0 leaves it out anyway.
    """
    wanted = os.environ.get("HONE_TEST_ENGINES", "auto")
    if wanted == "0":
        return Ended("vllm", 0, "left out: HONE_TEST_ENGINES=0", 0.0)
    hone = str(Path(sys.executable).parent / "hone")
    install = ["timeout", "-k", "10", "900", hone, "engines", "install", "vllm"]
    made = subprocess.run(install, cwd=ROOT, env={**os.environ, "PIP_RETRIES": "2"}, capture_output=True, text=True)
    if made.returncode == 0:
        return _followed("vllm", ["timeout", "-k", "30", "900", "scripts/conformance", "vllm", "-k", VLLM])
    print(made.stdout + made.stderr, file=sys.stderr)
    why = "its environment cannot be made, see above; HONE_TEST_ENGINES=0 leaves it out"
    return Ended("vllm", int(wanted == "1"), why, 0.0)


def _followed(stage: str, command: list[str]) -> Ended:
    began, said = time.monotonic(), ""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace")
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if re.search(r"\d+ (passed|failed|errors?|skipped|deselected).* in [\d.]+s", line):
            said = line.strip(" =\n")
    return Ended(stage, process.wait(), said, time.monotonic() - began)


def summary(ended: Sequence[Ended]) -> str:
    """Return a line for each stage."""
    lines = [
        f"{e.stage:<10} {'ok' if e.code in (0, NO_TESTS) else 'FAILED':<7} {e.seconds / 60:5.1f} min  {e.said}"
        for e in ended
    ]
    return "\n".join(["", *lines])


def main() -> int:
    """Return 0 if every stage passed, 1 if one failed, 5 if no test ran."""
    asked, words = options()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }  # a test has one core
    by_change = not (asked.all or asked.random or words)
    stages = list(STAGES) if asked.all or asked.changed is not None or words else list(SHORT)
    if asked.unit or asked.random:
        stages, words = ["fast"], ["tests/unit", *words]
    if asked.unit:
        words += ["--lf", "--lfnf=all"]
    if asked.random:
        seed = os.environ.setdefault("HONE_TEST_SEED", str(random.randrange(10**9)))
        print(f"Property tests draw their examples from HONE_TEST_SEED={seed}", flush=True)
        words.append(f"--hypothesis-seed={seed}")
    if asked.all:
        os.environ["HONE_TEST_ALL"] = "1"  # tests/support/examples.py
    changed = changed_since(asked.changed or "") if by_change else []
    with tempfile.NamedTemporaryFile("w", prefix="hone-changed-", suffix=".txt") as file:
        file.write("\n".join(changed))
        file.flush()
        choice = [f"--changed={file.name}"] if by_change else []  # with a space pytest takes the path for one of tests
        choice += ["--part", asked.part or ("0/1" if by_change else "1/1")]
        ended, over = [], None
        for stage in stages:
            if asked.minutes and stage not in SHORT:
                over = over or time.monotonic() + 60 * asked.minutes
                choice = [*choice, "--minutes", str(max(0.001, (over - time.monotonic()) / 60))]
            ended.append(run(stage, choice, words))
    if not words and (asked.all or asked.changed is not None and any(path.startswith(ABOUT_VLLM) for path in changed)):
        ended.append(run_vllm())
    print(summary(ended))
    if any(e.code not in (0, NO_TESTS) for e in ended):
        return 1
    return 0 if any(e.code == 0 for e in ended) else NO_TESTS


if __name__ == "__main__":
    sys.exit(main())
