"""Weights inside the messages of the connection, as text: slow, works everywhere, and the reference for the other transports."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hone.generation.remote.transports.layout import Named, layout, view


class SocketSender:
    def bytes_to_copy(self, tensor: Tensor) -> int:
        return tensor.nbytes

    def pack(self, tensors: Sequence[Named]) -> dict[str, Any]:
        places, size = layout(tensors)
        buffer = torch.zeros(size, dtype=torch.uint8)
        for (_, tensor), place in zip(tensors, places, strict=True):
            view(buffer, place).copy_(tensor)
        return {"transport": "socket", "places": places, "data": base64.b64encode(buffer.numpy().tobytes()).decode()}

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
