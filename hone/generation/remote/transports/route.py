"""Both sides of transports, by name, and the choice between memory of the engine's GPU and memory of the host."""

from __future__ import annotations

import base64
import contextlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.errors import ConfigError, GenerationError
from hone.generation.remote.gpus import uuid_of
from hone.generation.remote.transports.cuda_ipc import CudaSender, DeviceMappings
from hone.generation.remote.transports.layout import CHUNKS_IN_FLIGHT, Named, Sender, layout, view
from hone.generation.remote.transports.shared_memory import MemoryMappings, SharedMemorySender


class FileSender(Sender):
    """Safetensors files in a directory that both processes can read; None creates a temporary one."""

    def __init__(self, directory: str | None = None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hone-weights-", dir=directory)
        self._paths: list[Path] = []
        self._count = 0

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


class SocketSender(Sender):
    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        places, size = layout(tensors)
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, tensor), place in zip(tensors, places, strict=True):
            view(buffer, place).copy_(tensor)
        return {"transport": "socket", "places": places, "data": base64.b64encode(buffer.numpy().tobytes()).decode()}


CUDA_IPC = "cuda_ipc"
DIRECT = ("auto", CUDA_IPC)
"""Values of ``rollout.checkpoint_engine.backend`` with which weights stay on the GPU where they can."""


_THROUGH_HOST: dict[str, type[Sender]] = {
    "shared_memory": SharedMemorySender,
    "file": FileSender,
    "socket": SocketSender,
}


def make_sender(backend: str, *, same_machine: bool) -> Sender:
    """Create the sender of a ``rollout.checkpoint_engine.backend`` for weights in host memory.

    For ``auto`` and ``cuda_ipc`` that is shared memory on one machine, else the socket.
    """
    if backend in DIRECT:
        backend = "shared_memory" if same_machine else "socket"
    if backend not in _THROUGH_HOST:
        raise ConfigError(
            f"checkpoint_engine.backend={backend} cannot send weights to engine processes",
            why=f"the transports are {', '.join([*_THROUGH_HOST, CUDA_IPC])}",
            fix="actor_rollout_ref.rollout.checkpoint_engine.backend=auto",
            where="actor_rollout_ref.rollout.checkpoint_engine.backend",
        )
    return _THROUGH_HOST[backend]()


log = logging.getLogger("hone.generation.remote")


class Route:
    """The transports of weights to one engine.

    Weights on the engine's GPU stay on it, if the engine can map memory of the trainer (:mod:`.cuda_ipc`). All others, such as the
    copies for a replica that starts again, go through the host.

    Attributes:
        host: sender through the host.
        direct: sender on the GPU; None before the first weights on a GPU, and where they cannot stay on it.
        transport: of the last chunk.
        obstacle: why weights do not stay on the GPU; empty if they can, or if the configured transport is another one.
        fallbacks: number of times that the engine could not map memory of the GPU.
    """

    def __init__(self, backend: str, *, engine: str, gpus: Sequence[str], same_machine: bool, delta: bool) -> None:
        self.host, self.direct = make_sender(backend, same_machine=same_machine), None
        self.transport = self.obstacle = ""
        self.fallbacks = 0
        self._engine, self._gpus, self._wanted = engine, gpus, backend == CUDA_IPC
        self._usable, self._opened = backend in DIRECT, False
        if self._usable:
            self._note_obstacle(_obstacle(gpus, same_machine=same_machine, delta=delta))

    @property
    def untested(self) -> CudaSender | None:
        """Sender on the GPU as long as it is unknown whether the engine can map its memory; else None."""
        return None if self._opened else self.direct

    def begin(self, weights: Tensor) -> None:
        """Choose for weights on the device of a tensor, before the first chunk of a version."""
        if not self._usable or self.direct is not None or weights.device.type != "cuda":
            return
        if uuid_of(weights.device) != self._gpus[0]:
            self._note_obstacle("the engine computes on another GPU than the one with the weights")
        else:
            self.direct = CudaSender(weights.device)

    def opened(self) -> None:
        """Note that the engine can map memory of the GPU."""
        self._opened = True

    def fall_back(self, problem: str) -> None:
        """Send weights through the host from now on, because the engine could not map memory of the GPU."""
        self.fallbacks += 1
        self._wanted = True  # to be warned of
        self._note_obstacle(problem)

    def sender_for(self, tensors: Sequence[Named]) -> CudaSender | None:
        """Return the sender on the GPU if all tensors are there, and the engine can map its memory; else None: the host."""
        direct = self.direct if self._opened and tensors else None
        return direct if direct is not None and all(tensor.device == direct.device for _, tensor in tensors) else None

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        """Return a chunk with the tensors; one for which the GPU lacks memory goes through the host."""
        direct, chunk = self.sender_for(tensors), None
        if direct is not None:
            try:
                chunk = direct.pack(tensors)
            except torch.OutOfMemoryError as error:
                log.warning("weights for engine %s go through the host once: %s", self._engine, error)
        chunk = chunk or self.host.pack(tensors)
        self.transport = chunk["transport"]
        return chunk

    def finish(self) -> None:
        """Release memory that only this version needed; no chunk is in flight."""
        if self.direct is not None:
            self.direct.release_oversized()

    def close(self) -> None:
        """Release memory and files; the engine reads no chunk any more."""
        self.host.close()
        if self.direct is not None:
            self.direct.close()

    def _note_obstacle(self, obstacle: str) -> None:
        if not obstacle:
            return
        if self._wanted:
            log.warning("weights for engine %s go through the host, not by cuda_ipc: %s", self._engine, obstacle)
        if self.direct is not None:
            self.direct.close()
        self.obstacle, self.direct, self._usable, self._opened = obstacle, None, False, False


def _obstacle(gpus: Sequence[str], *, same_machine: bool, delta: bool) -> str:
    """Return why weights cannot stay on the GPU of an engine, or nothing."""
    if not same_machine:
        return "the engine is on another machine"
    if delta:
        return "checkpoint_engine.delta compares weights in memory of the host"
    if not gpus:
        return "the engine does not load weights on a GPU"
    if len(gpus) > 1:
        return f"the engine computes on {len(gpus)} GPUs, and mapping memory of another GPU is not verified"
    return ""


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
