"""For programs of other projects: a pretrained model that `hone serve` answers for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.capitals import write_tasks
from support.forked_python import Forks
from support.real_model import smollm2
from support.serve import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of SmolLM2-135M-Instruct."""
    return smollm2(tmp_path_factory)


@pytest.fixture(scope="module")
def url(model: Path, forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server of that model with the name ``smollm2``."""
    log = tmp_path_factory.mktemp("served") / "log"
    with serving(forks, model, log, "--name", "smollm2", "--max-model-len", "4096", "--dtype", "float32") as address:
        yield address


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of choosing and one of writing."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))
