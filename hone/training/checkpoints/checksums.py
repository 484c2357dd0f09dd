"""SHA-256 of the files of a checkpoint: computed while they are written, recorded in its manifest, verified before a resume.

Every process that writes a part of a checkpoint leaves ``checksums/<part>_<rank>.json``, from which the manifest is made, so that
no file is read back. Files are hashed in threads: hashlib releases the interpreter lock.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hone.insight import activity
from hone.training.checkpoints.storage import Storage

FOLDER = "checksums"
SEAL = "sha256_of_manifest"  # key of the manifest with the checksum of its other keys

_CHUNK = 4 << 20
_MAX_THREADS = 16


def leave_checksums(checkpoint: Storage, part: str, rank: int) -> None:
    """Write what a recording ``checkpoint`` has recorded, for :func:`collect_checksums`.

    Args:
        checkpoint: from :meth:`Storage.recording`.
        part: name that no other writer of this rank uses ("actor").
    """
    recorded = dict(checkpoint.recorded)
    checkpoint.write_text(f"{FOLDER}/{part}_{rank:05d}.json", json.dumps(recorded))


def collect_checksums(checkpoint: Storage) -> dict[str, str]:
    """Return the checksum of every file of a checkpoint, and remove the files that :func:`leave_checksums` wrote.

    Files whose writer left no checksum are read.
    """
    folder = checkpoint / FOLDER
    recorded: dict[str, str] = {}
    for name in folder.names():
        recorded |= json.loads(folder.read_text(name))
    folder.remove()
    files = checkpoint.sizes()
    return {
        **{name: digest for name, digest in recorded.items() if name in files},
        **file_checksums(checkpoint, sorted(files.keys() - recorded.keys())),
    }


def file_checksums(directory: Storage, names: Iterable[str]) -> dict[str, str]:
    """Read files and return their checksums. Raises OSError: a file is missing or cannot be read."""
    names = list(names)
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: _checksum(directory, name), names), strict=True))


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {**manifest, SEAL: _manifest_checksum(manifest)}


def seal_is_whole(manifest: Mapping[str, Any]) -> bool:
    return manifest.get(SEAL) == _manifest_checksum(manifest)


def _manifest_checksum(manifest: Mapping[str, Any]) -> str:
    content = {key: value for key, value in manifest.items() if key != SEAL}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _checksum(directory: Storage, name: str) -> str:
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    view = memoryview(buffer)
    with directory.open(name) as file:
        while count := file.readinto(view):  # type: ignore[attr-defined]  # files of fsspec have it, its annotation does not
            digest.update(view[:count])
            activity.tick()
    return digest.hexdigest()
