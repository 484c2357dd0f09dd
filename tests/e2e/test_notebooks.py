"""The notebooks run from top to bottom, and are stored without outputs."""

from __future__ import annotations

import ast
import importlib
import json
import re
from pathlib import Path

import nbformat
import pytest
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from support.forked_python import Forks
from support.patience import LONG

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ["00_data_sanity", "01_reward_debug", "02_advantage_debug", "03_loss_debug", "04_run_diagnostics"]


def test_all_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs_and_with_short_cells(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), (
        "clear the outputs before saving"
    )
    assert all(len(cell["source"]) <= 40 for cell in notebook["cells"]), "a cell should fit on a screen"
    assert notebook["cells"][0]["cell_type"] == "markdown" and any("assert" in "".join(c["source"]) for c in code)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_links_and_files_named_exist(path: Path) -> None:
    text = "".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    for name in re.findall(r"`((?:docs|notebooks|\d\d_)[\w/]*\.(?:md|ipynb))`", text):
        assert (ROOT / name).is_file() or (ROOT / "notebooks" / name).is_file(), name


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_names_imported_from_the_project_exist(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in imported:
        if (node.module or "").split(".")[0] == "hone":
            module = importlib.import_module(node.module or "")
            assert not (absent := [n.name for n in node.names if not hasattr(module, n.name)]), (node.module, absent)


@pytest.mark.long("hone/api", "notebooks")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    python = str(forks.bin / "python")
    notebook.cells.insert(0, nbformat.v4.new_code_cell(f"import sys; sys.executable = {python!r}"))
    kernel = AsyncKernelManager(kernel_name="python3")
    assert kernel.kernel_spec is not None
    kernel.kernel_spec.argv[0] = python
    NotebookClient(notebook, kernel, timeout=int(LONG), resources={"metadata": {"path": str(tmp_path)}}).execute(
        cleanup_kc=True
    )
    shown = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in shown), "no picture is shown"
