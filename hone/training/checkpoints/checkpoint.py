"""One checkpoint: opened, checked, and found by what a user calls it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.errors import CheckpointError
from hone.training.checkpoints.storage import Storage

MANIFEST = "checkpoint.json"
BEST = "best.json"
FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        storage: the directory it lies in.
        step: after which it was saved.
        value: of the metric that chooses the best checkpoint, at that step; None when it was not measured.
    """

    storage: Storage
    step: int
    value: float | None = None

    def __str__(self) -> str:
        return str(self.storage)

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's state."""
        return json.loads(self.storage.read_text("state.json"))

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that it was made with."""
        return yaml.safe_load(self.storage.read_text("config.yaml"))

    @classmethod
    def open(cls, location: str | Path | Storage) -> Checkpoint:
        """Open a checkpoint, checking that every file is there in full.

        Raises:
            CheckpointError: not a checkpoint, or incomplete, or of another format, or not to be read.
        """
        storage = Storage(location)
        try:
            content = json.loads(storage.read_text(MANIFEST))
            step, files = int(content["step"]), dict(content["files"])
        except FileNotFoundError as error:
            raise CheckpointError(
                f"'{storage}' is not a checkpoint: it has no {MANIFEST}",
                where="trainer.resume_from_path",
                fix="give a directory .../checkpoints/step_<N>",
            ) from error
        except OSError as error:
            raise CheckpointError(f"'{storage}' cannot be read: {error}", where="trainer.resume_from_path") from error
        except (ValueError, KeyError, TypeError) as error:
            raise _damaged(storage, f"{MANIFEST} cannot be understood ({error})") from error
        if content.get("format", 1) != FORMAT:
            raise CheckpointError(
                f"'{storage}' has format {content.get('format', 1)}, this version of Hone reads format {FORMAT}",
                why="the state of its optimizer lies in other files",
                fix=f"start a new run from its weights: model.path={storage}/actor",
            )
        found = storage.sizes()
        for name, size in files.items():
            if found.get(name) != size:
                raise _damaged(storage, f"{name} should have {size} bytes, found {found.get(name)}")
        return cls(storage, step, content.get("value"))


def find_checkpoint(location: str | Path) -> Checkpoint:
    """The checkpoint meant by ``location``: itself, or `latest` or `best` of a run or of a folder of checkpoints.

    ``RUN``, ``RUN/checkpoints`` and ``RUN/checkpoints/latest`` mean the newest, ``RUN/checkpoints/best`` the best.

    Raises:
        CheckpointError: there is none.
    """
    storage = Storage(location)
    if storage.is_file(MANIFEST):
        return Checkpoint.open(storage)
    wanted = storage.name if storage.name in ("best", "latest") else "latest"
    above = storage.parent if storage.name in ("best", "latest") else storage
    for root in (above, above / "checkpoints", _elsewhere(above)):
        if root is None:
            continue
        if wanted == "best" and root.is_file(BEST):
            return Checkpoint.open(root / f"step_{json.loads(root.read_text(BEST))['step']}")
        steps = complete_steps(root)
        if wanted == "latest" and steps:
            return Checkpoint.open(root / f"step_{steps[-1]}")
    raise CheckpointError(
        f"'{storage}' is neither a checkpoint nor a run with checkpoints"
        + (f", or has no {BEST} (trainer.best_ckpt_metric names what is best)" if wanted == "best" else ""),
        where="trainer.resume_from_path",
        fix="give .../checkpoints/step_<N>, .../checkpoints/best, or a run directory (`hone runs list`)",
    )


def complete_steps(root: Storage) -> list[int]:
    """Steps with a checkpoint below ``root``, rising. In an object store one without manifest is still being written."""
    found = (re.fullmatch(r"step_(\d+)", name) for name in root.names())
    steps = sorted(int(match[1]) for match in found if match)
    return steps if root.is_local else [step for step in steps if (root / f"step_{step}").is_file(MANIFEST)]


def files_named(checkpoint: Storage, files: Iterable[str]) -> set[str]:
    """The files that the indices among ``files`` name: weights of several files, and the shards of all ranks."""
    named: set[str] = set()
    for name in files:
        folder, _, file = name.rpartition("/")
        if file == "index.json":
            tensors = json.loads(checkpoint.read_text(name))["tensors"].values()
            named |= {f"{folder}/{piece[0]}" for tensor in tensors for piece in tensor["pieces"]}
        elif file.endswith(".safetensors.index.json"):
            named |= {
                f"{folder}/{weights}" for weights in json.loads(checkpoint.read_text(name))["weight_map"].values()
            }
    return named


def model_directory(location: str | Path, name: str) -> Path:
    """The Hugging Face directory ``name`` ("actor", "critic") of a checkpoint, as a local directory.

    That of a remote checkpoint is copied once a machine, into the user's cache.
    """
    storage = Storage(location)
    if storage.is_local:
        return storage.local_path / name
    key = hashlib.sha256(f"{storage}\n{storage.read_text(MANIFEST)}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "checkpoints" / key
    target = cache / name
    if not target.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=cache, prefix=".fetching-"))
        (storage / name).fetch(fresh)
        try:
            fresh.rename(target)
        except OSError:
            shutil.rmtree(fresh)
            if not target.is_dir():  # not that another process was first
                raise
    return target


def _elsewhere(run: Storage) -> Storage | None:
    """Where a run keeps its checkpoints when it was told to by trainer.checkpoint_dir."""
    if not run.is_file("config.yaml"):
        return None
    config = yaml.safe_load(run.read_text("config.yaml"))
    named = (config.get("trainer") or {}).get("checkpoint_dir")
    return Storage(named) if named else None


def _damaged(storage: Storage, what: str) -> CheckpointError:
    return CheckpointError(
        f"'{storage}' is damaged: {what}",
        why="training would go on from wrong numbers",
        fix="trainer.resume_mode=resume_path trainer.resume_from_path=<another checkpoint>",
    )
