"""The engine's side of all transports."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hone.errors import GenerationError
from hone.generation.remote.transports.cuda_ipc import DeviceMappings
from hone.generation.remote.transports.layout import Named, view
from hone.generation.remote.transports.shared_memory import MemoryMappings


class Mappings:
    """Mappings of the trainer's memory in this process, kept between chunks because mapping costs as much as copying."""

    def __init__(self) -> None:
        self.memory, self.device = MemoryMappings(), DeviceMappings()


@contextlib.contextmanager
def open_chunk(chunk: dict[str, Any], mappings: Mappings | None = None) -> Iterator[list[Named]]:
    """Give the tensors of a chunk, on the engine's side; they are views that are valid only inside the block.

    Without ``mappings``, which are kept between chunks, memory is mapped for this chunk only.

    Raises:
        GenerationError: the chunk's file or memory cannot be opened.
    """
    mappings = mappings or Mappings()
    match chunk["transport"]:
        case "socket":
            buffer = torch.frombuffer(bytearray(base64.b64decode(chunk["data"])), dtype=torch.uint8)
            yield _views(buffer, chunk)
        case "cuda_ipc":
            yield from _on_gpu(chunk, mappings)
        case kind:
            try:
                named = (
                    _file(chunk)
                    if kind == "file"
                    else _views(mappings.memory.get(chunk["path"], chunk["bytes"]), chunk)
                )
            except (OSError, RuntimeError) as error:
                raise GenerationError(
                    f"the engine cannot open new weights at {chunk['path']}: {error}",
                    why="it runs on another machine, in another container or as another user",
                    fix="actor_rollout_ref.rollout.checkpoint_engine.backend=socket",
                ) from error
            yield named


def _on_gpu(chunk: dict[str, Any], mappings: Mappings) -> Iterator[list[Named]]:
    """Yield a chunk's tensors on the GPU. Afterwards wait for all that reads them, because the sender reuses their memory."""
    try:
        buffer = mappings.device.get(chunk)
    except RuntimeError as error:
        raise GenerationError(
            f"the engine cannot map the trainer's memory of the GPU: {error}",
            why="it runs in another container, or the driver does not permit it",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=shared_memory",
        ) from error
    try:
        yield _views(buffer, chunk)
    finally:
        torch.cuda.synchronize(buffer.device)


def _file(chunk: dict[str, Any]) -> list[Named]:
    from safetensors.torch import load_file

    loaded = load_file(chunk["path"])
    return [(name, loaded[name]) for name in chunk["names"]]


def _views(buffer: Tensor, chunk: dict[str, Any]) -> list[Named]:
    return [(place["name"], view(buffer, place)) for place in chunk["places"]]
