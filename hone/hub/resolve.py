"""Replace names of the hub by local paths, in a configuration or for one model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hone.hub.datasets import dataset_files
from hone.hub.download import METADATA_FILES, MODEL_FILES, Download, download
from hone.hub.names import parse_hub_name

log = logging.getLogger("hone")


def resolve_names(config: Any, *, weights: bool = True) -> dict[str, list[dict[str, Any]]]:
    """Download what the configuration names on the hub, and put the local paths in its place.

    Args:
        config: a tree; its fields with ``hub`` metadata are read and changed.
        weights: download a model's weights, too; False downloads only what a check needs.

    Returns:
        For every key with hub names, and each of them: name, commit, and hash of every file (see :meth:`Download.record`).

    Raises:
        HoneError: a repository does not exist, or cannot be reached.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    for key, block, field in _hub_fields(config, ""):
        value = getattr(block, field.name)
        listed = value if isinstance(value, list) else [value]
        resolved: list[Any] = []
        for entry in listed:
            name = parse_hub_name(entry) if isinstance(entry, str) else None
            if name is None:
                resolved.append(entry)
                continue
            if field.metadata["hub"] == "model":
                downloaded = _model(str(name), weights)
                resolved.append(str(downloaded.path))
            else:
                files, downloaded = dataset_files(name, "val" if field.name.startswith("val") else "train")
                resolved += [str(file) for file in files]
            records.setdefault(key, []).append(downloaded.record())
        if key in records:
            setattr(block, field.name, resolved if isinstance(value, list) or len(resolved) > 1 else resolved[0])
    return records


def local_model(path: str | Path) -> str:
    """Return the local directory of a model: the path itself, or the downloaded repository of a hub name."""
    name = parse_hub_name(str(path))
    return str(path) if name is None else str(_model(str(path), weights=True).path)


def local_files(files: Sequence[str], purpose: str) -> list[str]:
    """Return local dataset files: paths unchanged, and the downloaded files of hub names.

    Args:
        files: paths or names of datasets.
        purpose: "train" or "val"; it chooses the split of a name without one.
    """
    local: list[str] = []
    for file in files:
        name = parse_hub_name(file)
        local += [file] if name is None else [str(path) for path in dataset_files(name, purpose)[0]]
    return local


def _model(text: str, weights: bool) -> Download:
    name = parse_hub_name(text)
    assert name is not None
    downloaded = download(name, "model", MODEL_FILES if weights else METADATA_FILES)
    log.info("%s: %s", name, downloaded.path)
    return downloaded


def _hub_fields(tree: Any, prefix: str) -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    """Yield (key, block, field) of every field that may hold a name of the hub."""
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if "hub" in field.metadata:
            yield prefix + field.name, tree, field
        elif dataclasses.is_dataclass(value):
            yield from _hub_fields(value, f"{prefix}{field.name}.")
