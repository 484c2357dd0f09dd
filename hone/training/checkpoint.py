"""Checkpoints: written beside, renamed into place, so that a half-written one is never picked up.

<run>/checkpoints/step_<N>/
    checkpoint.json    step, files with their sizes; written last
    config.yaml        the resolved configuration
    state.json         step, data position, KL controller, invariants
    actor/             Hugging Face directory (or PEFT adapter) with tokenizer
    actor_optimizer.safetensors
    critic/, critic_optimizer.safetensors      when there is a critic
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from hone.errors import CheckpointError

MANIFEST = "checkpoint.json"


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int

    @property
    def state(self) -> dict[str, Any]:
        """The trainer's state."""
        return json.loads((self.path / "state.json").read_text())

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that it was made with."""
        return yaml.safe_load((self.path / "config.yaml").read_text())

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a checkpoint, checking that every file is there in full.

        Raises:
            CheckpointError: not a checkpoint, or incomplete.
        """
        manifest = path / MANIFEST
        if not manifest.is_file():
            raise CheckpointError(
                f"'{path}' is not a checkpoint: it has no {MANIFEST}",
                where="trainer.resume_from_path",
                fix="give a directory .../checkpoints/step_<N>",
            )
        content = json.loads(manifest.read_text())
        for name, size in content["files"].items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                raise CheckpointError(
                    f"'{path}' is damaged: {name} should have {size} bytes, found {found}",
                    why="training would go on from wrong numbers",
                    fix="trainer.resume_mode=resume_path trainer.resume_from_path=<another checkpoint>",
                )
        return cls(path, int(content["step"]))


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: ``<run>/checkpoints``.
        keep: newest checkpoints kept; None keeps all.
    """

    def __init__(self, root: Path, keep: int | None) -> None:
        self.root, self.keep = root, keep

    def steps(self) -> list[int]:
        """Steps with a checkpoint, rising."""
        if not self.root.is_dir():
            return []
        found = (re.fullmatch(r"step_(\d+)", entry.name) for entry in self.root.iterdir())
        return sorted(int(match.group(1)) for match in found if match)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint, or None."""
        steps = self.steps()
        return Checkpoint.open(self.root / f"step_{steps[-1]}") if steps else None

    def save(self, step: int, state: dict[str, Any], config: dict[str, Any], write: Callable[[Path], None]) -> Path:
        """Write checkpoint ``step``: ``write(directory)`` puts the weights in; then it appears under its name at once.

        Raises:
            CheckpointError: the disk is full or cannot be written; earlier checkpoints are untouched.
        """
        final, partial = self.root / f"step_{step}", self.root / f".partial-step_{step}"
        try:
            self._clear_partial()
            partial.mkdir(parents=True)
            write(partial)
            (partial / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
            (partial / "state.json").write_text(json.dumps(state, indent=1))
            files = {
                str(file.relative_to(partial)): file.stat().st_size
                for file in sorted(partial.rglob("*"))
                if file.is_file()
            }
            (partial / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
            _sync(partial)
            self._remove(step)
            partial.rename(final)
            _sync_directory(self.root)
        except Exception as error:
            number = _system_error(error)
            if number is None:
                raise
            raise self._explain(error, number, step) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._retire()
        return final

    def set_aside_after(self, step: int) -> list[int]:
        """Rename checkpoints later than ``step`` to ``abandoned_step_<N>``: a run that goes on from an earlier one would
        otherwise find them as its newest. Returns their steps.
        """
        later = [found for found in self.steps() if found > step]
        for found in later:
            aside = self.root / f"abandoned_step_{found}"
            if aside.exists():
                shutil.rmtree(aside)
            (self.root / f"step_{found}").rename(aside)
        return later

    def _explain(self, error: Exception, number: int, step: int) -> CheckpointError:
        free = shutil.disk_usage(next(p for p in (self.root, *self.root.parents) if p.exists())).free
        full = number in (errno.ENOSPC, errno.EDQUOT)
        reason = f"the disk is full ({free / 2**20:.0f} MiB free)" if full else str(error)
        kept = ", ".join(f"step_{s}" for s in self.steps()) or "none"
        return CheckpointError(
            f"cannot save the checkpoint of step {step} in '{self.root}': {reason}",
            why=f"the run cannot be resumed beyond its earlier checkpoints ({kept}), which are untouched",
            fix="free space, or set trainer.default_local_dir=<another disk> or trainer.max_ckpt_to_keep=1; run again",
        )

    def _retire(self) -> None:
        if self.keep is not None:
            for step in self.steps()[: -self.keep]:
                self._remove(step)

    def _remove(self, step: int) -> None:
        """Delete a checkpoint, if it exists; a kill on the way leaves no half of it under its name."""
        checkpoint, doomed = self.root / f"step_{step}", self.root / f".partial-old_step_{step}"
        if checkpoint.exists():
            checkpoint.rename(doomed)
            shutil.rmtree(doomed)

    def _clear_partial(self) -> None:
        for leftover in self.root.glob(".partial-*") if self.root.is_dir() else ():
            shutil.rmtree(leftover)


def _system_error(error: Exception) -> int | None:
    """The errno behind a failed write, None when the error is of another kind. Libraries written in Rust (safetensors,
    tokenizers) raise exceptions of their own that only name it in their text.
    """
    if isinstance(error, OSError):
        return error.errno or errno.EIO
    named = re.search(r"\(os error (\d+)\)", str(error))
    return int(named[1]) if named else None


def _sync(directory: Path) -> None:
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
    _sync_directory(directory)


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
