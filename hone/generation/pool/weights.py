"""The weights that were published last, kept so that a replica which is started again can have them at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hone.generation.remote.delta import Differences

Named = tuple[str, Tensor]


class PublishedWeights:
    """A copy of the last whole version, in the memory of this process. Its buffers are used again for the next version.

    Attributes:
        dtype: of the floating-point weights in it, which is that of the engines, so that none is kept wider than it is served;
            None keeps each as it comes.
        version: of the weights; 0 are those that engines begin with.
        whole: whether all of a version have arrived.
    """

    def __init__(self) -> None:
        self.dtype: torch.dtype | None = None
        self.version, self.whole = 0, True
        self._kept: dict[str, Tensor] = {}
        self._arrived: set[str] = set()

    def begin(self) -> None:
        """A new version follows; what is left of one that did not arrive whole is forgotten."""
        if not self.whole:
            self._kept = {}
        self.whole, self._arrived = False, set()

    def add(self, tensors: Sequence[Named]) -> None:
        """Keep some of it."""
        with torch.no_grad():
            for name, tensor in tensors:
                known = self._kept.get(name)
                dtype = self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype
                if known is None or known.shape != tensor.shape or known.dtype != dtype:
                    known = self._kept[name] = torch.empty_like(tensor, device="cpu", dtype=dtype)
                known.copy_(tensor)
                self._arrived.add(name)

    def differences(self) -> Differences:
        """What changes until the next call of :meth:`add`; everything where there is no whole version before this one."""
        return Differences(self._kept.get)

    def finish(self, version: int) -> None:
        """That was all of it; nothing at all means the weights that there were, under another number."""
        if self._arrived:
            self._kept = {name: self._kept[name] for name in self._kept if name in self._arrived}
        self.version, self.whole = version, True

    def tensors(self) -> list[Named]:
        """All of them; none while engines have the weights that they began with."""
        return list(self._kept.items())
