"""Safetensors files in a directory that both processes can read."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hone.generation.remote.transports.layout import CHUNKS_IN_FLIGHT, Named


class FileSender:
    """Safetensors files in a directory that both processes can read; None creates a temporary one."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-weights-", dir=directory)
        self._paths: list[Path] = []
        self._count = 0

    def bytes_to_copy(self, tensor: Tensor) -> int:
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        from safetensors.torch import save_file

        self._count += 1
        path = Path(self._directory.name, f"{self._count}.safetensors")
        save_file(_without_shared_storage(tensors), path)
        self._paths.append(path)
        if len(self._paths) > CHUNKS_IN_FLIGHT:
            self._paths.pop(0).unlink()
        return {"transport": "file", "path": str(path), "names": [name for name, _ in tensors]}

    def close(self) -> None:
        self._directory.cleanup()


def _without_shared_storage(tensors: Sequence[Named]) -> dict[str, Tensor]:
    """Copy tensors that share storage with another one, which safetensors would refuse."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors:
        whole = tensor.detach().cpu().contiguous()
        memory = whole.untyped_storage().data_ptr()
        separate[name] = whole.clone() if memory in storages else whole
        storages.add(memory)
    return separate
