"""Convert GSM8K's problems to rows for the tool agent: worked solutions become calls of a calculator.

    question   Anna has 7 apples. She buys 12 more. How many apples does Anna have?
    answer     She has 7+12=<<7+12=19>>19 apples.
               #### 19

becomes a conversation in which the assistant calls ``calculator`` with ``7+12``, reads 19, and answers ``#### 19``. The script
reads files with the columns ``question`` and ``answer``, as GSM8K is published. It also reads the files of ``hone data make
arithmetic``, whose solutions have one sum per line.

    python prepare.py FILE.parquet --out OUT.parquet [--plain PERCENT]
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hone.agents.tasks.demonstrations import calls, result, says
from hone.agents.tools.base import ToolError
from hone.agents.tools.calculator import Calculator, calculate
from hone.data.files import read_rows

_SUM = re.compile(r"<<([^=<>]+)=[^<>]*>>|^([\d.+*/() -]+)=[\d.-]+$", re.MULTILINE)


def main() -> int:
    """Read a file, write the rows and print their number."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--plain", type=int, default=0, help="percent of the demonstrations that have no calls")
    parser.add_argument("--seed", type=int, default=1, help="chooses the demonstrations without calls")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    source = read_rows(given.file, required=(), optional=("question", "answer", "extra_info", "reward_model"))
    rows = [row(*problem(entry.values), plain=draw.randrange(100) < given.plain) for entry in source]
    given.out.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), given.out)
    with_calls = sum(len(entry["messages"]) > 2 for entry in rows)
    print(f"{given.out}: {len(rows)} problems, {with_calls} demonstrations call the calculator")
    return 0


def problem(values: dict[str, Any]) -> tuple[str, str, str]:
    """Return question, worked solution and right answer of a row."""
    if values.get("question"):
        return values["question"], values["answer"], values["answer"].rpartition("####")[2].strip().replace(",", "")
    facts = values["extra_info"]  # written by hone data make, whose solutions may be wrong on purpose
    return facts["question"], facts["answer"], values["reward_model"]["ground_truth"]


def row(question: str, solution: str, truth: str, *, plain: bool) -> dict[str, Any]:
    """Return a row for `hone sft` and `hone train`."""
    prompt = [{"role": "user", "content": question}]
    played = None if plain else demonstration(solution)
    answer = [*played, says(f"#### {truth}")] if played else [says(re.sub(r"<<[^<>]*>>", "", solution))]
    return {
        "data_source": "openai/gsm8k",
        "prompt": prompt,
        "messages": prompt + answer,
        "tools": json.dumps([Calculator().schema]),
        "agent_name": "tool_agent",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"question": question},
    }


def demonstration(solution: str) -> list[dict[str, Any]] | None:
    """Return a call and its result for every sum of a solution, or None when a sum is not arithmetic."""
    messages = []
    for number, match in enumerate(_SUM.finditer(solution)):
        expression = (match[1] or match[2]).replace(" ", "")
        try:
            value = calculate(expression)
        except ToolError:
            return None
        messages += [calls("calculator", number, expression=expression), result("calculator", value, number)]
    return messages


if __name__ == "__main__":
    sys.exit(main())
