"""The folders of examples/: each is whole, and its files for GPUs would start where models and data are.

Their READMEs' commands run in test_docs.py.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from support.patience import SOON

from hone.config import TREES, load_config
from hone.preflight import Stage, examine

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
LEARNING = sorted(path.parent.name for path in EXAMPLES.glob("*/gpu.yaml"))
ABSENT = "does not exist"


def test_the_index_lists_every_example() -> None:
    listed = re.findall(r"\]\(([\w]+)/README\.md\)", (EXAMPLES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))


@pytest.mark.parametrize("name", LEARNING)
def test_an_example_shows_its_curve_and_names_its_files(name: str) -> None:
    folder = EXAMPLES / name
    readme = (folder / "README.md").read_text(encoding="utf-8")
    assert "](curve.png)" in readme and (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    for path in folder.iterdir():
        if path.is_file() and path.name not in ("README.md", "curve.png"):
            assert f"[`{path.name}`]({path.name})" in readme, f"the README does not say what {path.name} holds"


@pytest.mark.parametrize("name", LEARNING)
def test_the_file_for_gpus_can_be_used_apart_from_its_paths(name: str) -> None:
    text = (EXAMPLES / name / "gpu.yaml").read_text(encoding="utf-8")
    tree = TREES["prefer" if "- dpo" in text else "train"]
    config = load_config(tree, [], config_path=str(EXAMPLES / name), config_name="gpu")
    report = examine(config, (Stage.ARITHMETIC,))
    assert not report.warnings, report.render()
    assert all(ABSENT in found.error.render() for found in report.errors), report.render()


PUBLISHED = [
    {
        "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
        "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nThat is 48+24 = <<48+24=72>>72 in all.\n#### 72",
    },
    {"question": "What do 1,200 cost at $2?", "answer": "1200*2=$<<1200*2=2400>>2400\n#### 2,400"},
    {"question": "How many?", "answer": "It is <<x=1>>1.\n#### 1"},
]


def test_gsm8k_as_published_becomes_calls_with_their_results(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PUBLISHED))
    script = EXAMPLES / "gsm8k_tool_agent" / "prepare.py"
    command = [sys.executable, str(script), str(tmp_path / "gsm8k.jsonl"), "--out", str(tmp_path / "out.parquet")]
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=SOON).stdout
    assert "3 problems, 2 demonstrations call the calculator" in said
    first, second, third = pq.read_table(tmp_path / "out.parquet").to_pylist()
    calls = [call["function"]["arguments"] for m in first["messages"] for call in m.get("tool_calls") or ()]
    assert calls == ['{"expression": "48/2"}', '{"expression": "48+24"}']
    assert [m["content"] for m in first["messages"] if m["role"] == "tool"] == ["24", "72"]
    assert first["messages"][-1]["content"] == "#### 72" and first["agent_name"] == "tool_agent"
    assert second["reward_model"]["ground_truth"] == "2400"
    assert [m["role"] for m in third["messages"]] == ["user", "assistant"], "x is no arithmetic: the text stays"
    assert third["messages"][1]["content"] == "It is 1.\n#### 1"
