"""A directory that holds checkpoints: on a local disk, or under any URL that fsspec knows (s3://, gs://, memory://, ...)."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from hone.errors import CheckpointError, HoneError

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "hf"))
"""Protocols of stores that know no directories."""


class Storage:
    """A directory, local or remote; nothing is created until something is written.

    A local file is on the disk when :meth:`create` returns (fsync). Errors of a remote store, of whatever type, are OSErrors.

    Args:
        location: path or URL.

    Raises:
        CheckpointError: no file system is known for this URL, or its package is not installed.
    """

    def __init__(self, location: str | Path | Storage) -> None:
        if isinstance(location, Storage):
            self.files, self.path = location.files, location.path
            return
        try:
            self.files, self.path = fsspec.url_to_fs(str(location))
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"no storage is known for '{location}': {error}",
                fix="give a local path, or a URL of fsspec; for s3:// and gs://: pip install 'hone-rl[remote]'",
            ) from error

    def __truediv__(self, name: str) -> Storage:
        below = Storage(self)
        below.path = f"{self.path.rstrip('/')}/{name}"
        return below

    def __str__(self) -> str:
        return self.path if self.is_local else str(self.files.unstrip_protocol(self.path))

    @property
    def is_local(self) -> bool:
        """Whether it lies in this machine's file system."""
        return isinstance(self.files, LocalFileSystem)

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def parent(self) -> Storage:
        """The directory above."""
        above = Storage(self)
        above.path = self.path.rstrip("/").rsplit("/", 1)[0]
        return above

    @property
    def local_path(self) -> Path:
        """The path, of a local directory."""
        if not self.is_local:
            raise ValueError(f"{self} is not local")
        return Path(self.path)

    # reading ---------------------------------------------------------------------------------------------------------

    def is_file(self, name: str) -> bool:
        """Whether there is a file of this name below."""
        with self._translated():
            return self.files.isfile(f"{self.path}/{name}")

    def names(self) -> list[str]:
        """Names of the files and directories right below, none when the directory does not exist."""
        with self._translated():
            self.files.invalidate_cache(self.path)
            if not self.files.isdir(self.path):
                return []
            return [entry.rstrip("/").rsplit("/", 1)[-1] for entry in self.files.ls(self.path, detail=False)]

    def sizes(self) -> dict[str, int]:
        """Every file below, by its path from here, with its size in bytes."""
        with self._translated():
            self.files.invalidate_cache(self.path)
            found = self.files.find(self.path, detail=True)
        start = len(self.path.rstrip("/")) + 1
        return {path[start:]: int(about["size"]) for path, about in sorted(found.items())}

    def read_text(self, name: str) -> str:
        """The content of a file."""
        with self.open(name) as file:
            return file.read().decode()

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file to read from any place in it."""
        with self._translated(), self.files.open(f"{self.path}/{name}", "rb") as file:
            yield file  # type: ignore[misc]  # fsspec says less than it gives

    def fetch(self, into: Path) -> Path:
        """Copy everything below into a local directory; returns it."""
        with self._translated():
            into.mkdir(parents=True, exist_ok=True)
            for name in self.sizes():
                (into / name).parent.mkdir(parents=True, exist_ok=True)
                self.files.get_file(f"{self.path}/{name}", str(into / name))
        return into

    # writing ---------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Write a file from its beginning; it is there for good when the block ends, and not there if it fails."""
        path = f"{self.path}/{name}"
        with self._translated():
            if self.is_local:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                with Path(path).open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                return
            remote: Any = self.files.open(path, "wb")
            try:
                yield remote
            except BaseException:
                if isinstance(remote, AbstractBufferedFile):
                    remote.discard()
                    remote.closed = True  # or the collector would close it, and so upload the half
                raise
            remote.close()

    def write_text(self, name: str, text: str) -> None:
        """Write a small file."""
        with self.create(name) as file:
            file.write(text.encode())

    def replace_text(self, name: str, text: str) -> None:
        """Write a small file, perhaps in the place of an older one; a reader sees one or the other, whole."""
        self.write_text(f"{name}.new", text)
        if self.is_local:
            (self.local_path / f"{name}.new").replace(self.local_path / name)
            return
        with self._translated():
            self.files.mv(f"{self.path}/{name}.new", f"{self.path}/{name}")

    def put(self, directory: Path) -> None:
        """Copy the files right in a local directory here."""
        for file in sorted(directory.iterdir()):
            with file.open("rb") as source, self.create(file.name) as target:
                shutil.copyfileobj(source, target, 1 << 20)

    def make(self) -> None:
        """Create the directory, where the store knows such a thing. A bucket is never made: its name would be a typing error."""
        if OBJECT_STORES.intersection(
            [self.files.protocol] if isinstance(self.files.protocol, str) else self.files.protocol
        ):
            return
        with self._translated():
            self.files.makedirs(self.path, exist_ok=True)

    def remove(self) -> None:
        """Delete everything below, if there is anything."""
        if self.is_local:
            if self.local_path.exists():
                shutil.rmtree(self.local_path)
            return
        with self._translated():
            if self.files.exists(self.path):
                self.files.rm(self.path, recursive=True)
            self.files.invalidate_cache()

    def remove_file(self, name: str) -> None:
        """Delete one file, if it exists."""
        with self._translated():
            if self.files.isfile(f"{self.path}/{name}"):
                self.files.rm_file(f"{self.path}/{name}")
            self.files.invalidate_cache()

    def sync(self) -> None:
        """Put a local directory's list of names, and those of the directories below, on the disk."""
        if not self.is_local:
            return
        for folder in (self.local_path, *(path for path in self.local_path.rglob("*") if path.is_dir())):
            handle = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

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


def as_bytes(file: IO[bytes], count: int) -> bytes:
    """Exactly ``count`` bytes from where ``file`` stands.

    Raises:
        EOFError: the file ends before.
    """
    content = file.read(count)
    if len(content) != count:
        raise EOFError(f"the file ends after {len(content)} of {count} bytes")
    return content
