"""One checkpoint: its check, and its location from a path, `latest` or `best`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.config.environment import written_value
from hone.errors import CheckpointError
from hone.insight import activity
from hone.training.checkpoints.checksums import SEAL, file_checksums, seal_is_whole
from hone.training.checkpoints.storage import Storage

MANIFEST = "checkpoint.json"
STATE = "state.json"
BEST = "best.json"
FORMAT = 2

log = logging.getLogger("hone")

_STEP_FOLDER = re.compile(r"(?:abandoned_)?step_(\d+)")
_SECONDS_WORTH_A_LINE = 2.0


class _Damage(Exception):
    """Damage of a checkpoint, described for its message."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    storage: Storage
    step: int
    state: dict[str, Any]  # of the trainer
    # of the metric that selects the best checkpoint, at that step; None if it was not measured
    value: float | None = None
    # SHA-256 of each file; None in a checkpoint of a version that recorded none
    checksums: dict[str, str] | None = None

    def __str__(self) -> str:
        return str(self.storage)

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of its run; reading a damaged file raises CheckpointError."""
        try:
            config = yaml.safe_load(self.storage.read_text("config.yaml"))
        except (yaml.YAMLError, ValueError) as error:
            raise _damaged(self.storage, f"config.yaml cannot be parsed ({error})") from error
        if not isinstance(config, dict):
            raise _damaged(self.storage, "config.yaml is not a mapping")
        return config

    @classmethod
    def open(cls, location: str | Path | Storage) -> Checkpoint:
        """Open a checkpoint, and check that every file is complete; :meth:`verify` checks their content. Raises
        CheckpointError: it is not a checkpoint, is incomplete, edited or unreadable, or has another format.
        """
        storage = Storage(location)
        with _explained(storage):
            return cls._opened(storage)

    def verify(self, below: str = "") -> None:
        """Check the content of every file whose name begins with ``below`` against its checksum. Raises
        CheckpointError: a file is damaged, or cannot be read.
        """
        if self.checksums is None:
            log.warning("'%s' has no checksums, because an earlier version wrote it: its files are not verified", self)
            return
        started = time.perf_counter()
        with _explained(self.storage):
            self._verified(below)
        seconds = time.perf_counter() - started
        if seconds > _SECONDS_WORTH_A_LINE:
            size = sum(count for name, count in self.storage.sizes().items() if name.startswith(below))
            log.info("verified '%s': %.0f MB in %.1f s", self, size / 1e6, seconds)

    @contextlib.contextmanager
    def loading_state(self) -> Iterator[dict[str, Any]]:
        """Yield the state of the trainer; what is wrong with an unverified one is reported as damage. Raises
        CheckpointError: the state lacks a part, or a part has another type.
        """
        try:
            yield self.state
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if self.checksums is not None:  # it is as it was written: a bug
                raise
            raise _damaged(self.storage, f"{STATE} cannot be loaded ({type(error).__name__}: {error})") from error

    @classmethod
    def _opened(cls, storage: Storage) -> Checkpoint:
        """Open a checkpoint; raise _Damage if it is incomplete or edited."""
        numbered = _STEP_FOLDER.fullmatch(storage.name)
        try:
            manifest = json.loads(storage.read_text(MANIFEST))
            step, files = manifest["step"], dict(manifest["files"])
            if type(step) is not int or step < 0:
                raise ValueError(f"step={step!r}")
        except FileNotFoundError as error:
            if numbered and _steps(storage.parent):
                raise _Damage(f"it has no {MANIFEST}") from error
            raise CheckpointError(
                f"'{storage}' is not a checkpoint: it has no {MANIFEST}",
                where="trainer.resume_from_path",
                fix="give a directory .../checkpoints/step_<N>",
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise _Damage(f"{MANIFEST} cannot be parsed ({type(error).__name__}: {error})") from error
        if manifest.get("format", 1) != FORMAT:
            raise CheckpointError(
                f"'{storage}' has format {manifest.get('format', 1)}, but this version of Hone reads format {FORMAT}",
                why="its optimizer state has other files",
                fix=f"start a new run from its weights: model.path={storage}/actor",
            )
        checksums = manifest.get("sha256")
        if (checksums is not None or SEAL in manifest) and not seal_is_whole(manifest):
            raise _Damage(f"{MANIFEST} was changed after it was written")
        if numbered and int(numbered[1]) != step:
            raise _Damage(f"{MANIFEST} says step {step}, but the directory is {storage.name}")
        sizes = storage.sizes()
        for name, size in files.items():
            if sizes.get(name) != size:
                raise _Damage(f"{name} has {sizes.get(name, 0)} bytes instead of {size}")
        return cls(storage, step, _state(storage, step), manifest.get("value"), checksums)

    def _verified(self, below: str) -> None:
        """Raise _Damage if a file differs from its checksum."""
        expected = {name: digest for name, digest in (self.checksums or {}).items() if name.startswith(below)}
        with activity.doing("verify checkpoint"):
            actual = file_checksums(self.storage, expected)
        different = [name for name, digest in expected.items() if actual[name] != digest]
        if different:
            others = f" (and {len(different) - 1} more files)" if len(different) > 1 else ""
            first = different[0]
            raise _Damage(
                f"{first}{others} does not match its checksum: sha256 {actual[first][:12]}..., not {expected[first][:12]}..."
            )


@contextlib.contextmanager
def _explained(storage: Storage) -> Iterator[None]:
    """Raise CheckpointError for damage, and for what cannot be read."""
    try:
        with storage.restoring():
            yield
    except _Damage as damage:
        raise _damaged(storage, str(damage)) from damage


def find_checkpoint(location: str | Path) -> Checkpoint:
    """Open the checkpoint of a location: itself, or `latest` or `best` of a run or a folder of checkpoints.

    ``RUN``, ``RUN/checkpoints`` and ``RUN/checkpoints/latest`` mean the newest, ``RUN/checkpoints/best`` the best.

    Raises CheckpointError: there is no checkpoint.
    """
    storage = Storage(location)
    if storage.is_file(MANIFEST):
        return Checkpoint.open(storage)
    wanted = storage.name if storage.name in ("best", "latest") else "latest"
    parent = storage.parent if storage.name in ("best", "latest") else storage
    for root in (parent, parent / "checkpoints", _configured_folder(parent)):
        if root is None:
            continue
        best = best_record(root) if wanted == "best" else None
        if best is not None:
            return Checkpoint.open(root / f"step_{best['step']}")
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
    steps = _steps(root)
    return steps if root.is_local else [step for step in steps if (root / f"step_{step}").is_file(MANIFEST)]


def best_record(root: Storage) -> dict[str, Any] | None:
    """Return step, metric and value of the best checkpoint in ``root``, None if none is marked. Raises CheckpointError:
    the mark is damaged.
    """
    if not root.is_file(BEST):
        return None
    try:
        record = json.loads(root.read_text(BEST))
        return {"step": int(record["step"]), "metric": str(record["metric"]), "value": record["value"]}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"'{root}/{BEST}' cannot be parsed: {type(error).__name__}: {error}",
            why="it names the best checkpoint",
            fix=f"remove it (the next save writes it again), and give .../step_<N>: {_listed(_steps(root))}",
        ) from error


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
    if not run.is_file("config.yaml"):
        return None
    config = yaml.safe_load(run.read_text("config.yaml"))
    named = written_value(config, "trainer.checkpoint_dir")
    return Storage(named) if named else None


def _steps(root: Storage) -> list[int]:
    matches = (re.fullmatch(r"step_(\d+)", name) for name in root.names())
    return sorted(int(match[1]) for match in matches if match)


def _listed(steps: Iterable[int]) -> str:
    return ", ".join(f"step_{step}" for step in steps) or "there is none"


def _state(storage: Storage, step: int) -> dict[str, Any]:
    """Return the state of the trainer; raise _Damage if it is missing, cannot be parsed, or is of another step."""
    try:
        state = json.loads(storage.read_text(STATE))
    except FileNotFoundError as error:
        raise _Damage(f"it has no {STATE}") from error
    except (ValueError, RecursionError) as error:
        raise _Damage(f"{STATE} cannot be parsed ({type(error).__name__}: {error})") from error
    if not isinstance(state, dict):
        raise _Damage(f"{STATE} is a {type(state).__name__}, not an object")
    if state.get("step", step) != step:
        raise _Damage(f"{STATE} says step {state['step']}, but {MANIFEST} says step {step}")
    return state


def _newest_whole(root: Storage, damaged: Storage) -> Checkpoint | None:
    """Return the newest checkpoint in ``root`` whose files are whole, other than the damaged one."""
    for step in reversed(_steps(root)):
        storage = root / f"step_{step}"
        if storage.path == damaged.path:
            continue
        with contextlib.suppress(_Damage, CheckpointError, OSError):  # this one is not whole either
            checkpoint = Checkpoint._opened(storage)
            checkpoint._verified("")
            return checkpoint
    return None


def _damaged(storage: Storage, what: str) -> CheckpointError:
    whole = _newest_whole(storage.parent, storage)
    if whole is None:
        fix = "there is no other whole checkpoint: trainer.experiment_name=<another name> for a new run"
    else:
        unverified = "" if whole.checksums is not None else ", which has no checksums"
        fix = f"use the newest whole checkpoint, step {whole.step}{unverified}: "
        fix += f"trainer.resume_mode=resume_path trainer.resume_from_path={whole}"
    return CheckpointError(
        f"'{storage}' is damaged: {what}",
        why="training would continue with wrong numbers",
        where="trainer.resume_from_path",
        fix=fix,
    )
