"""Saved weights of a training service: ``<folder>/<model>/<weights or sampler_weights>/<name>``, whole or not there."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from safetensors import SafetensorError

from hone.apps.tinker.adapters import AdapterSet
from hone.errors import RequestError

SCHEME = "tinker://"
MODEL = re.compile(r"[A-Za-z0-9_-]{1,64}:train:[0-9]{1,9}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_KINDS = ("weights", "sampler_weights")
_NEW, _OLD, _UNSAVED = ".new", ".old", "unsaved"
log = logging.getLogger("hone.serve")


class SavedWeights:
    """Folder of saved weights; opening it finishes what a kill interrupted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._recover()

    def _recover(self) -> None:
        """Finish replacements that a kill interrupted, remove unfinished files, and say which models were not saved."""
        for half in self._folder.glob("*/*/.*-*") if not self._folder.is_symlink() else ():
            state, _, name = half.name.partition("-")
            if any(part.is_symlink() for part in (half, *list(half.parents)[:2])) or state not in (_NEW, _OLD):
                continue
            if state == _OLD and not (half.parent / name).exists():
                half.rename(half.parent / name)
            else:
                shutil.rmtree(half)
        for mark in sorted((self._folder / _UNSAVED).glob("*")):
            log.warning(
                "'%s' was in training when the server ended: what it learned after its last save is lost", mark.name
            )
            mark.unlink()

    def mark(self, model: str, *, unsaved: bool) -> None:
        """Note on the disk that a model has, or no longer has, weights that are not saved."""
        mark = self._folder / _UNSAVED / model
        try:
            if unsaved:
                mark.parent.mkdir(parents=True, exist_ok=True)
                mark.touch()
            else:
                mark.unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(error) from error

    def write(self, adapters: AdapterSet, adapter: str, model: str, kind: str, name: str, *, overwrite: bool) -> Path:
        """Save an adapter under another name, and rename its folder when it is whole; return the folder.

        Raises:
            RequestError: the name is none, or has weights already, or a weight is not finite, or the disk is full.
        """
        folder = self._place(model, kind, name)
        new, old = (folder.with_name(f"{state}-{name}") for state in (_NEW, _OLD))
        if folder.exists() and not overwrite:
            raise RequestError(f"{kind} '{name}' of this model exist already", field="path")
        try:
            adapters.save(adapter, new, optimizer=kind == "weights")
            for file in new.iterdir():
                with file.open("rb") as written:
                    os.fsync(written.fileno())
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        except BaseException as error:
            shutil.rmtree(new, ignore_errors=True)
            if old.exists() and not folder.exists():
                old.rename(folder)
            if isinstance(error, OSError | SafetensorError):
                raise _unwritable(error) from error
            raise
        shutil.rmtree(old, ignore_errors=True)
        if kind == "weights":
            self.mark(model, unsaved=False)
        return folder

    def find(self, path: str) -> Path:
        """Return the folder of saved weights."""
        model, _, rest = path.removeprefix(SCHEME).partition("/")
        kind, _, name = rest.partition("/")
        if not path.startswith(SCHEME) or not rest:
            raise RequestError(f"'{path}' is not a path of saved weights", field="path")
        folder = self._place(model, kind, name)
        if not folder.exists():
            raise RequestError(f"there are no weights at '{path}'", field="path")
        return folder

    def _place(self, model: str, kind: str, name: str) -> Path:
        """Return the folder of weights, from names that a client gave: below the service's own, and through no link."""
        if not _NAME.fullmatch(name) or set(name) == {"."}:
            raise RequestError(f"'{name[:80]}' is not a name of letters, digits, '.', '_' and '-'", field="path")
        if not MODEL.fullmatch(model) or kind not in _KINDS:
            raise RequestError(f"'{model[:80]}/{kind[:80]}' is not a model with saved weights", field="path")
        folder = self._folder / model / kind / name
        if any(part.is_symlink() for part in (folder, *list(folder.parents)[:2])):
            raise RequestError(f"{kind} '{name}' of this model is a link, which is not followed", field="path")
        return folder


def _unwritable(error: Exception) -> RequestError:
    return RequestError(
        f"the server's disk cannot be written ({error})",
        why="nothing was changed",
        fix="free space there, then send it again as the next operation",
    )
