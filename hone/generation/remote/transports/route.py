"""The choice between memory of the engine's GPU and memory of the host, for weights to one engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.generation.remote.gpus import uuid_of
from hone.generation.remote.transports.cuda_ipc import CudaSender
from hone.generation.remote.transports.layout import Named
from hone.generation.remote.transports.senders import CUDA_IPC, DIRECT, make_sender

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
