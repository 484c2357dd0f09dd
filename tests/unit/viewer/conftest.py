"""One invented run for all tests of the viewer."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.viewer_runs import write_run

from hone.apps.lab.viewer.api import Workspace


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with 8 groups of 4 answers, a third of them played with a tool."""
    return write_run(tmp_path_factory.mktemp("viewer") / "demo", steps=6, groups=8, n=4, prompts=16, agents=0.3)


@pytest.fixture(scope="session")
def workspace(run_path: Path) -> Workspace:
    """The run, completely indexed."""
    workspace = Workspace({"demo": run_path})
    workspace.archived({}).rows()
    workspace.archived({}).index.wait()
    return workspace
