"""Try every family of the installed Transformers and write tests/families.json: `python scripts/families.py [KIND ...]`.

Each family has a process of its own, as many at a time as there are cores, and three minutes; all of them take about twelve minutes on two cores. With names, the others keep their verdicts.
`scripts/make_docs` then writes the table of docs/models.md.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
SECONDS = 180
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def tried(kind: str) -> dict[str, object]:
    """Return the verdict of one family."""
    command = [sys.executable, __file__, "--one", kind]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=os.environ | ENVIRONMENT)
    except subprocess.TimeoutExpired:
        why = f"it takes more than {SECONDS} s"
    else:
        if ended.returncode == 0:
            return json.loads(ended.stdout.splitlines()[-1])
        why = f"its process ended with {ended.returncode}"
    return {"kind": kind, "verdict": "fails", "why": why, "gap": None, "adapter": ""}


def main() -> None:
    """Try the families that are named, or all, and write what became of them."""
    from support.family_page import VERDICTS  # pyright: ignore[reportMissingImports]
    from support.family_probe import KINDS, as_json, probe  # pyright: ignore[reportMissingImports]

    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(asdict(probe(sys.argv[2]))))
        return
    kinds = sys.argv[1:] or KINDS
    known = {one["kind"]: one for one in json.loads(VERDICTS.read_text())} if VERDICTS.is_file() else {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for verdict in pool.map(tried, kinds):
            known[str(verdict["kind"])] = verdict
            print(verdict["kind"], verdict["verdict"], verdict["why"], flush=True)
    VERDICTS.write_text(as_json([known[kind] for kind in KINDS if kind in known]))


if __name__ == "__main__":
    main()
