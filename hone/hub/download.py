"""Download repositories of the hub into its local cache, with readable errors.

``huggingface_hub`` does the work and reads its own environment: HF_TOKEN, HF_ENDPOINT (a mirror), HF_HOME, HF_HUB_OFFLINE.
HONE_HUB=modelscope downloads from ModelScope instead (the extra ``modelscope``).
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.errors import HoneError, ModelError
from hone.extras import install_command
from hone.progress import LINE_SECONDS

MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken", "merges.txt")
"""What is downloaded of a model: never code, never pickled weights."""
METADATA_FILES = tuple(pattern for pattern in MODEL_FILES if pattern != "*.safetensors")
"""What a check or a plan needs of a model."""
DATA_ENDINGS = (".parquet", ".jsonl", ".json", ".arrow")

_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Download:
    """A repository in the local cache."""

    name: HubName  # the name it was asked by
    kind: str  # "model" or "dataset"
    path: Path  # folder of the snapshot
    commit: str  # revision of the snapshot, as the hub names it

    def record(self) -> dict[str, Any]:
        """Return name, commit, and size and hash of every file, for ``run.json``."""
        return {"name": str(self.name), "kind": self.kind, "commit": self.commit, "files": file_hashes(self.path)}


def download(name: HubName, kind: str, patterns: Sequence[str]) -> Download:
    """Download the files of a repository that match, unless the cache has them.

    Args:
        kind: "model" or "dataset".
        patterns: shell patterns of the files.

    Raises:
        ModelError: the repository or the revision does not exist, or needs a token.
        HoneError: the hub cannot be reached (code E-hub-offline).
    """
    if os.environ.get("HONE_HUB", "").lower() == "modelscope":
        return _from_modelscope(name, kind, patterns)
    from huggingface_hub import constants, snapshot_download

    with _hub_errors(name, kind):
        path = Path(
            snapshot_download(
                name.repository,
                repo_type=kind,
                revision=name.revision,
                allow_patterns=list(patterns),
                local_files_only=constants.is_offline_mode(),
                tqdm_class=None if sys.stderr.isatty() else plain_bar(),
            )
        )
    return Download(name, kind, path, path.name)


def plain_bar() -> type[Any]:
    """Return a bar for huggingface_hub that writes a line every few seconds, where there is no terminal."""
    from huggingface_hub.utils import tqdm

    class PlainBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            form = "{desc}: {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left"
            super().__init__(*args, **{"disable": False, **kwargs, "mininterval": LINE_SECONDS, "bar_format": form})

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.n:
                self.fp.write(f"{self}\n")

        def close(self) -> None:
            self.fp = io.StringIO()
            super().close()

    return PlainBar


def list_files(name: HubName) -> list[str]:
    """Return the paths of a dataset repository's files; without a network, those of the cached snapshot. Raises
    HoneError: as :func:`download`.
    """
    from huggingface_hub import HfApi, constants, snapshot_download

    with _hub_errors(name, "dataset"):
        if constants.is_offline_mode():
            folder = Path(
                snapshot_download(name.repository, repo_type="dataset", revision=name.revision, local_files_only=True)
            )
            return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
        return HfApi().list_repo_files(name.repository, repo_type="dataset", revision=name.revision)


def file_hashes(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and hash of every file below a folder.

    The cache names a large file by its sha256 and a small one by its git hash; both are read from the name. A file that is
    not a link into the cache is hashed.
    """
    hashes: dict[str, dict[str, Any]] = {}
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        blob = file.resolve().name
        if re.fullmatch(r"[0-9a-f]{64}", blob):
            digest = {"sha256": blob}
        elif _COMMIT.fullmatch(blob):
            digest = {"git": blob}
        else:
            with file.open("rb") as stream:
                digest = {"sha256": hashlib.file_digest(stream, "sha256").hexdigest()}
        hashes[str(file.relative_to(folder))] = {"bytes": file.stat().st_size, **digest}
    return hashes


@contextmanager
def _hub_errors(name: HubName, kind: str) -> Iterator[None]:
    """Convert the errors of huggingface_hub to one message each."""
    import httpx2
    from huggingface_hub import errors
    from huggingface_hub.utils import HfHubHTTPError

    command = f"hf download {name.repository}" + (" --repo-type dataset" if kind == "dataset" else "")
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelError(
            f"the {kind} '{name.repository}' is gated: the hub gives it to accounts that accepted its terms",
            fix="accept them on its page, then set HF_TOKEN to a token of that account (or `hf auth login`)",
            code="E-hub",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelError(
            f"the {kind} '{name.repository}' has no revision '{name.revision}'",
            fix="name a branch, a tag or a commit of the repository",
            code="E-hub",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelError(
            f"'{name.repository}' is neither a local path nor a public {kind} of the hub",
            fix="check the name; a private repository needs HF_TOKEN (or `hf auth login`)",
            code="E-hub",
        ) from error
    except (errors.LocalEntryNotFoundError, errors.IncompleteSnapshotError, errors.OfflineModeIsEnabled) as error:
        raise offline(name, kind, command) from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        raise HoneError(
            f"the hub answered {status} for '{name.repository}'", fix=f"try again later; then: {command}", code="E-hub"
        ) from error
    except httpx2.TransportError as error:  # connection refused, no route, name not resolved, no answer
        raise offline(name, kind, command) from error
    except OSError as error:
        raise HoneError(
            f"'{name.repository}' cannot be stored: {error.strerror or error}",
            fix="free space in the cache, or choose another with HF_HOME=DIR",
            code="E-hub",
        ) from error


def offline(name: HubName, kind: str, command: str) -> HoneError:
    """Return the error for a repository that is not in the cache while the hub cannot be reached."""
    return HoneError(
        f"'{name.repository}' is not a local path, the cache does not have it, and the hub cannot be reached"
        + (" (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""),
        why=f"the {kind} must be on this machine before the run starts",
        fix=f"on a machine with a network: {command} --local-dir DIR; copy DIR here and name it instead. "
        f"For a local path: the current directory is {Path.cwd()}",
        code="E-hub-offline",
    )


def _from_modelscope(name: HubName, kind: str, patterns: Sequence[str]) -> Download:
    try:
        from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ModelError(
            "HONE_HUB=modelscope, but the package modelscope is not installed",
            fix=install_command("modelscope"),
            code="E-extra",
        ) from error
    fetch: Callable[..., str] = snapshot_download
    try:
        path = Path(fetch(name.repository, repo_type=kind, revision=name.revision, allow_patterns=list(patterns)))
    except (OSError, ValueError, RuntimeError) as error:
        raise HoneError(
            f"ModelScope cannot give '{name.repository}': {str(error).splitlines()[0]}",
            fix="check the name and the network, or unset HONE_HUB",
            code="E-hub",
        ) from error
    return Download(name, kind, path, name.revision or "master")


_NAME = re.compile(
    r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(?::(?P<subset>[\w.-]*))?(?::(?P<split>[\w.-]+))?(?:@(?P<revision>[\w./-]+))?"
)
_FILE_ENDINGS = (".parquet", ".json", ".jsonl", ".arrow", ".csv", ".gguf", ".safetensors", ".yaml", ".py")


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, with the part of a dataset and the revision to use."""

    repository: str  # ORG/NAME
    subset: str | None = None  # configuration of a dataset; None means its default
    split: str | None = None  # split of a dataset; None means the only one, or the one the key is for
    revision: str | None = None  # branch, tag or commit; None means the main branch

    def __str__(self) -> str:
        part = f":{self.subset or ''}:{self.split}" if self.split else f":{self.subset}" if self.subset else ""
        return self.repository + part + (f"@{self.revision}" if self.revision else "")


def parse_hub_name(text: str) -> HubName | None:
    """Return the hub name in a text, or None where the text is a local path.

    A text is a local path if it exists, if its first folder exists, or if it ends like a file.
    """
    match = _NAME.fullmatch(text)
    if match is None or text.endswith(_FILE_ENDINGS):
        return None
    if Path(text).exists() or Path(text.partition("/")[0]).exists():
        return None
    return HubName(
        match["repository"], subset=match["subset"] or None, split=match["split"], revision=match["revision"]
    )
