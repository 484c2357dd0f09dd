"""Prepare the example: an environment with mini-swe-agent, and tasks with demonstrations.

    python prepare.py environment FOLDER            the harness in a virtual environment of its own
    python prepare.py data FOLDER [--wrong PERCENT] train.parquet and val.parquet

A task is to write a word to a file. Its demonstration is what the harness records: a call of its tool ``bash``, the result as the
harness words it, and the command that submits. A share of the demonstrations writes another word, so that a model that imitates
them succeeds only sometimes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone import installer
from hone.agents.tasks.demonstrations import calls, result

HARNESS = "mini-swe-agent==2.4.6"
SYSTEM = "You work with bash."
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
RESULT = "<returncode>0</returncode>\n<output>\n</output>"
WORDS = ("red", "green", "blue", "white", "black", "pink")
FILES = ("a.txt", "b.txt", "c.txt", "d.txt")
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Execute a bash command",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The bash command to execute"}},
            "required": ["command"],
        },
    },
}
"""The harness's only tool."""


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("environment", "data"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wrong", type=int, default=50, help="percent of the demonstrations that write another word")
    parser.add_argument("--size", type=int, default=96, help="number of training tasks")
    parser.add_argument("--val-size", type=int, default=16, help="number of validation tasks")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.what == "environment":
        venv.create(given.folder, with_pip=True)
        return subprocess.call([str(given.folder / "bin" / "python"), "-P", installer.__file__, HARNESS])
    draw = random.Random(given.seed)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", given.size), ("val", given.val_size)):
        rows = [row(draw, wrong=draw.randrange(100) < given.wrong) for _ in range(size)]
        pq.write_table(pa.Table.from_pylist(rows), given.folder / f"{name}.parquet")
        print(f"{given.folder}/{name}.parquet: {size} tasks")
    return 0


def row(draw: random.Random, *, wrong: bool) -> dict[str, Any]:
    """Return a task as a row for `hone sft` and `hone train`."""
    word, file = draw.choice(WORDS), draw.choice(FILES)
    written = draw.choice([other for other in WORDS if other != word]) if wrong else word
    prompt = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Write {word} to {file}"}]
    played = [
        calls("bash", command=f"echo {written} > {file}"),
        result("bash", RESULT),
        calls("bash", 1, command=SUBMIT),
    ]
    return {
        "data_source": "coding_agent",
        "prompt": prompt,
        "messages": prompt + played,
        "tools": json.dumps([BASH]),
        "agent_name": "program",
        "reward_model": {"style": "rule", "ground_truth": word},
        "extra_info": {"file": file},
    }


if __name__ == "__main__":
    sys.exit(main())
