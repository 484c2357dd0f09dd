"""The engine's side of all transports."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from hone.errors import GenerationError
from hone.generation.remote.transports.layout import Named, view
from hone.generation.remote.transports.shared_memory import Mappings


@contextlib.contextmanager
def open_chunk(chunk: dict[str, Any], mappings: Mappings | None = None) -> Iterator[list[Named]]:
    """Give the tensors of a chunk, on the engine's side; they are views that are valid only inside the block.

    Args:
        chunk: from the sender.
        mappings: kept between chunks; None maps shared memory for this chunk only.

    Raises:
        GenerationError: the chunk's file or memory cannot be opened.
    """
    kind = chunk["transport"]
    if kind == "socket":
        buffer = torch.frombuffer(bytearray(base64.b64decode(chunk["data"])), dtype=torch.uint8)
        yield [(place["name"], view(buffer, place)) for place in chunk["places"]]
        return
    try:
        if kind == "file":
            from safetensors.torch import load_file

            loaded = load_file(chunk["path"])
            named = [(name, loaded[name]) for name in chunk["names"]]
        else:
            buffer = (mappings or Mappings()).get(chunk["path"], chunk["bytes"])
            named = [(place["name"], view(buffer, place)) for place in chunk["places"]]
    except (OSError, RuntimeError) as error:
        raise GenerationError(
            f"the engine cannot open new weights at {chunk['path']}: {error}",
            why="it runs on another machine, in another container or as another user",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=socket",
        ) from error
    yield named
