"""The folders of examples/: each is whole, and its files for GPUs would start where models and data are.

Their READMEs' commands run in test_docs.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
