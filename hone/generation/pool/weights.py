"""A copy of the latest weights, for replicas that restart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.generation.remote.delta import Differences

Named = tuple[str, Tensor]


class PublishedWeights:
    """A copy of the last complete version, in the memory of this process. The next version reuses its buffers.

    Attributes:
        dtype: of the stored floating-point weights, the same as the engines'; None stores each in its dtype.
        version: of the weights; 0 for those that engines start with.
        whole: whether all weights of a version have arrived.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.version, self.whole = 0, True
        self._kept: dict[str, Tensor] = {}
        self._arrived: set[str] = set()

    def begin(self) -> None:
        """Start a new version; drop an incomplete one."""
        if not self.whole:
            self._kept = {}
        self.whole, self._arrived = False, set()

    def add(self, tensors: Sequence[Named]) -> None:
        """Store some weights of the version."""
        with torch.no_grad():
            for name, tensor in tensors:
                stored = self._kept.get(name)
                dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
                if stored is None or stored.shape != tensor.shape or stored.dtype != dtype:
                    stored = self._kept[name] = torch.empty_like(tensor, device="cpu", dtype=dtype)
                stored.copy_(tensor)
                self._arrived.add(name)

    def differences(self) -> Differences:
        """Return the differences to the stored version, valid until the next :meth:`add`; all weights without such a version."""
        return Differences(self._kept.get)

    def finish(self, version: int) -> None:
        """Complete the version; without new weights the stored ones get its number."""
        if self._arrived:
            self._kept = {name: self._kept[name] for name in self._kept if name in self._arrived}
        self.version, self.whole = version, True

    def tensors(self) -> list[Named]:
        """Return all weights; none while engines have the weights that they started with."""
        return list(self._kept.items())
