"""One checkpoint: its check, and its location from a path, `latest` or `best`."""

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
        storage: its directory.
        step: after which it was saved.
        value: of the metric that selects the best checkpoint, at that step; None if it was not measured.
    """

    storage: Storage
    step: int
    value: float | None = None

    def __str__(self) -> str:
        return str(self.storage)

    @property
    def state(self) -> dict[str, Any]:
        """State of the trainer."""
        return json.loads(self.storage.read_text("state.json"))

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of its run."""
        return yaml.safe_load(self.storage.read_text("config.yaml"))

    @classmethod
    def open(cls, location: str | Path | Storage) -> Checkpoint:
        """Open a checkpoint, and check that every file is complete.

        Raises:
            CheckpointError: it is not a checkpoint, is incomplete or unreadable, or has another format.
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
            raise _damaged(storage, f"{MANIFEST} cannot be parsed ({error})") from error
        if content.get("format", 1) != FORMAT:
            raise CheckpointError(
                f"'{storage}' has format {content.get('format', 1)}, but this version of Hone reads format {FORMAT}",
                why="its optimizer state has other files",
                fix=f"start a new run from its weights: model.path={storage}/actor",
            )
        sizes = storage.sizes()
        for name, size in files.items():
            if sizes.get(name) != size:
                raise _damaged(storage, f"{name} has {sizes.get(name, 0)} bytes instead of {size}")
        return cls(storage, step, content.get("value"))


def find_checkpoint(location: str | Path) -> Checkpoint:
    """Open the checkpoint of a location: itself, or `latest` or `best` of a run or a folder of checkpoints.

    ``RUN``, ``RUN/checkpoints`` and ``RUN/checkpoints/latest`` mean the newest, ``RUN/checkpoints/best`` the best.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    storage = Storage(location)
    if storage.is_file(MANIFEST):
        return Checkpoint.open(storage)
    wanted = storage.name if storage.name in ("best", "latest") else "latest"
    parent = storage.parent if storage.name in ("best", "latest") else storage
    for root in (parent, parent / "checkpoints", _configured_folder(parent)):
        if root is None:
            continue
        if wanted == "best" and root.is_file(BEST):
            return Checkpoint.open(root / f"step_{json.loads(root.read_text(BEST))['step']}")
        steps = complete_steps(root)
        if wanted == "latest" and steps:
            return Checkpoint.open(root / f"step_{steps[-1]}")
    raise CheckpointError(
        f"'{storage}' is neither a checkpoint nor a run with checkpoints"
        + (f", or has no {BEST} (needs trainer.best_ckpt_metric)" if wanted == "best" else ""),
        where="trainer.resume_from_path",
        fix="give .../checkpoints/step_<N>, .../checkpoints/best, or a run directory (`hone runs list`)",
    )


def complete_steps(root: Storage) -> list[int]:
    """Return the steps of complete checkpoints in ``root``, ascending. In an object store a manifest marks complete ones."""
    matches = (re.fullmatch(r"step_(\d+)", name) for name in root.names())
    steps = sorted(int(match[1]) for match in matches if match)
    return steps if root.is_local else [step for step in steps if (root / f"step_{step}").is_file(MANIFEST)]


def files_named(checkpoint: Storage, files: Iterable[str]) -> set[str]:
    """Return the files that the index files among ``files`` list: weights in several files, and the shards of all ranks."""
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
    """Return the Hugging Face directory ``name`` ("actor", "critic") of a checkpoint, as a local directory.

    A remote directory is copied once per machine, into the user's cache.
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
            if not target.is_dir():  # unless another process was first
                raise
    return target


def _configured_folder(run: Storage) -> Storage | None:
    """Return the trainer.checkpoint_dir of a run, if it has one."""
    if not run.is_file("config.yaml"):
        return None
    config = yaml.safe_load(run.read_text("config.yaml"))
    named = (config.get("trainer") or {}).get("checkpoint_dir")
    return Storage(named) if named else None


def _damaged(storage: Storage, what: str) -> CheckpointError:
    return CheckpointError(
        f"'{storage}' is damaged: {what}",
        why="training would continue with wrong numbers",
        fix="trainer.resume_mode=resume_path trainer.resume_from_path=<another checkpoint>",
    )
