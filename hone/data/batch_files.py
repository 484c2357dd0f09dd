"""A batch on disk: ``tensors.safetensors`` and ``batch.json`` in one directory. Nothing is pickled or unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.data.ragged import Ragged
from hone.errors import CheckpointError

TENSORS, LAYOUT = "tensors.safetensors", "batch.json"


def save(columns: Mapping[str, Tensor | Ragged | list], meta: dict[str, Any], directory: Path) -> None:
    """Write columns and metadata; see :meth:`hone.data.batch.Batch.save`."""
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            layout[name] = {"kind": "ragged"}
            # clones: safetensors refuses tensors that share storage, and columns of one batch do share it
            tensors[f"ragged:{name}:values"] = column.values.detach().contiguous().clone()
            tensors[f"ragged:{name}:offsets"] = column.offsets.clone()
        elif isinstance(column, Tensor):
            layout[name] = {"kind": "dense"}
            tensors[f"dense:{name}"] = column.detach().contiguous().clone()
        else:
            for row, value in enumerate(column):
                _check(value, f"row {row} of column '{name}'")
            layout[name] = {"kind": "objects", "rows": column}
    for key, value in meta.items():
        _check(value, f"metadata '{key}'")
    text = json.dumps({"columns": layout, "meta": meta})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / TENSORS)
        (directory / LAYOUT).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the batch: {error}", where=str(directory)) from error


def load(directory: Path) -> tuple[dict[str, Tensor | Ragged | list], dict[str, Any]]:
    """Read columns and metadata; see :meth:`hone.data.batch.Batch.load`."""
    try:
        tensors = load_file(directory / TENSORS)
        written = json.loads((directory / LAYOUT).read_text(encoding="utf-8"))
        columns = {name: _column(name, entry, tensors) for name, entry in written["columns"].items()}
        return columns, written["meta"]
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"no batch can be read: {error}",
            where=str(directory),
            fix=f"the directory must hold {TENSORS} and {LAYOUT}, as Batch.save writes them",
        ) from error


def _column(name: str, entry: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor | Ragged | list:
    if entry["kind"] == "ragged":
        return Ragged(tensors[f"ragged:{name}:values"], tensors[f"ragged:{name}:offsets"])
    return tensors[f"dense:{name}"] if entry["kind"] == "dense" else entry["rows"]


def _check(value: Any, what: str) -> None:
    """Raise TypeError unless ``value`` survives a round trip through JSON."""
    try:
        kept = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} cannot be saved as JSON: {error}") from error
    if not kept and value == value:
        raise TypeError(f"{what} would change in JSON (a tuple, a set, or keys that are not strings): {value!r:.120}")
