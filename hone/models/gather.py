"""A gather whose indices may repeat, with gradients that are sums in a fixed order, the same in every run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Gather:
    """The source of each slot, and the way back for gradients."""

    source: Tensor  # ``[K]`` index of the value in each slot
    slots: Tensor  # ``[K]`` slots, ordered by their source
    starts: Tensor  # ``[N]`` first entry of each value in ``slots``

    @classmethod
    def from_source(cls, source: Tensor, count: int, device: torch.device) -> Gather:
        """Build from the source of each slot, ``[K]`` on the CPU; sources are below ``count`` and may repeat."""
        uses = source.bincount(minlength=count)
        slots = source.argsort(stable=True)
        return cls(*(part.to(device) for part in (source, slots, uses.cumsum(0) - uses)))

    def __call__(self, values: Tensor) -> Tensor:
        """Gather ``values [N, ...]`` to ``[K, ...]``."""
        return _Gather.apply(values, self)  # type: ignore[return-value]

    def sums(self, grads: Tensor) -> Tensor:
        """Add up the gradients ``[K, ...]`` of gathered values for each value, ``[N, ...]``.

        It is one kernel without atomics; on CUDA it adds in float32.
        """
        totals = F.embedding_bag(self.slots, grads.reshape(len(grads), -1), self.starts, mode="sum")
        return totals.view(-1, *grads.shape[1:])


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return values.index_select(0, gather.source)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gather.sums(grads[0]), None
