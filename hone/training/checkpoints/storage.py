"""Directories for checkpoints: on a local disk, or at any URL that fsspec supports (s3://, gs://, memory://, ...)."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from hone.errors import CheckpointError, HoneError
from hone.extras import install_command

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "hf"))
"""Protocols of stores without directories."""


class Storage:
    """A directory, local or remote; it is created with its first file.

    A local file is on the disk when :meth:`create` returns (fsync). All errors of a remote store are raised as OSError.
    ``recorded``: SHA-256 of the files created, by their path below the directory of :meth:`recording`. Raises
    CheckpointError: fsspec does not support the URL, or its package is not installed.
    """

    def __init__(self, location: str | Path | Storage) -> None:
        if isinstance(location, Storage):
            self.files, self.path = location.files, location.path
            self.recorded, self._recording_below = location.recorded, location._recording_below
            return
        self.recorded: dict[str, str] = {}
        self._recording_below: str | None = None
        try:
            self.files, self.path = fsspec.url_to_fs(str(location))
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"no storage supports '{location}': {error}",
                fix=f"a local path, or a URL of fsspec; for s3:// and gs://: {install_command('remote')}",
            ) from error

    def __truediv__(self, name: str) -> Storage:
        child = Storage(self)
        child.path = f"{self.path.rstrip('/')}/{name}"
        return child

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.files.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        return isinstance(self.files, LocalFileSystem)

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def parent(self) -> Storage:
        parent = Storage(self)
        parent.path = self.path.rstrip("/").rsplit("/", 1)[0]
        return parent

    @property
    def local_path(self) -> Path:
        if not self.is_local:
            raise ValueError(f"{self} is not local")
        return Path(self.path)

    def recording(self) -> Storage:
        """Return this directory with an empty record, to which files created in it and below it are added."""
        storage = Storage(self)
        storage.recorded, storage._recording_below = {}, self.path.rstrip("/")
        return storage

    # reading ---------------------------------------------------------------------------------------------------------

    def is_file(self, name: str) -> bool:
        with self._translated():
            return self.files.isfile(f"{self.path}/{name}")

    def names(self) -> list[str]:
        """Return the names of files and directories, none if the directory does not exist."""
        with self._translated():
            self.files.invalidate_cache(self.path)
            if not self.files.isdir(self.path):
                return []
            return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in self.files.ls(self.path, detail=False)]

    def sizes(self) -> dict[str, int]:
        """Return the relative path of every file, with its size in bytes."""
        with self._translated():
            self.files.invalidate_cache(self.path)
            files = self.files.find(self.path, detail=True)
        start = len(self.path.rstrip("/")) + 1
        return {path[start:]: int(about["size"]) for path, about in sorted(files.items())}

    def read_text(self, name: str) -> str:
        with self.open(name) as file:
            return file.read().decode()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        with self._translated(), self.files.open(f"{self.path}/{name}", "rb") as file:
            yield file  # type: ignore[misc]  # fsspec's annotation is too wide

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Raise CheckpointError for a file of a checkpoint that cannot be read."""
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"'{self}' cannot be read: {error}", where="trainer.resume_from_path") from error

    def fetch(self, into: Path) -> Path:
        """Copy all files to a local directory and return it."""
        with self._translated():
            into.mkdir(parents=True, exist_ok=True)
            for name in self.sizes():
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(f"{self.path}/{name}", str(into / name))
        return into

    # writing ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Create a file; it is durable after the block, and does not exist if the block fails."""
        path = f"{self.path}/{name}"
        with self._translated():
            if self.is_local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with Path(path).open("wb") as file, self._recorded(path, file) as recorded:
                    yield recorded
                    file.flush()
                    os.fsync(file.fileno())
                return
            remote: Any = self.files.open(path, "wb")
            try:
                with self._recorded(path, remote) as recorded:
                    yield recorded
            except BaseException:
                if isinstance(remote, AbstractBufferedFile):
                    remote.discard()
                    remote.closed = True  # otherwise the garbage collector closes it and uploads half a file
                raise
            remote.close()

    def write_text(self, name: str, text: str) -> None:
        with self.create(name) as file:
            file.write(text.encode())

    def replace_text(self, name: str, text: str) -> None:
        """Create or replace a small file; a reader sees either the old or the new one."""
        self.write_text(f"{name}.new", text)
        if self.is_local:
            (self.local_path / f"{name}.new").replace(self.local_path / name)
            return
        with self._translated():
            self.files.mv(f"{self.path}/{name}.new", f"{self.path}/{name}")

    def put(self, directory: Path) -> None:
        for file in sorted(directory.iterdir()):
            with file.open("rb") as source, self.create(file.name) as target:
                shutil.copyfileobj(source, target, 1 << 20)

    def make(self) -> None:
        """Create the directory, unless in an object store: a missing bucket is a typing error."""
        if OBJECT_STORES.intersection(
            [self.files.protocol] if isinstance(self.files.protocol, str) else self.files.protocol
        ):
            return
        with self._translated():
            self.files.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Delete the directory, if it exists."""
        if self.is_local:
            if self.local_path.exists():
                shutil.rmtree(self.local_path)
            return
        with self._translated():
            if self.files.exists(self.path):
                self.files.rm(self.path, recursive=True)
            self.files.invalidate_cache()

    def remove_file(self, name: str) -> None:
        with self._translated():
            if self.files.isfile(f"{self.path}/{name}"):
                self.files.rm_file(f"{self.path}/{name}")
            self.files.invalidate_cache()

    def sync(self) -> None:
        """Sync a local directory and its subdirectories to the disk."""
        if not self.is_local:
            return
        for folder in (self.local_path, *(path for path in self.local_path.rglob("*") if path.is_dir())):
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    @contextlib.contextmanager
    def _recorded(self, path: str, file: IO[bytes]) -> Iterator[IO[bytes]]:
        """Yield a file to write to; its checksum is recorded after the block, where this directory records."""
        if self._recording_below is None:
            yield file
            return
        hashing = _HashingFile(file)
        yield cast(IO[bytes], hashing)
        self.recorded[path[len(self._recording_below) + 1 :]] = hashing.sha256.hexdigest()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (OSError, HoneError):
            raise
        except Exception as error:
            if self.is_local:
                raise
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


class _HashingFile:
    """File open for writing that hashes what passes through it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.sha256 = file, hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        self.sha256.update(content)
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def as_bytes(file: IO[bytes], count: int) -> bytes:
    """Read exactly ``count`` bytes from a file's current position. Raises EOFError: the file is too short."""
    content = file.read(count)
    if len(content) != count:
        raise EOFError(f"the file ends after {len(content)} of {count} bytes")
    return content
