"""Exponential moving average of the trained weights."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Average of parameters after each update: ``decay * average + (1 - decay) * weights``, from the initial weights on.

    Args:
        parameters: names and parameters, which may be shards; the average of a shard is sharded alike.
        decay: between 0 and 1.

    Attributes:
        values: float32 averages by the name of the parameter.

    >>> weights = nn.Parameter(torch.zeros(1))
    >>> average = WeightAverage([("w", weights)], decay=0.75)
    >>> weights.data.fill_(4.0), average.update(), average.values["w"]
    (tensor([4.]), None, tensor([1.]))
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], decay: float) -> None:
        self._parameters = dict(parameters)
        self._averaged = get_ema_multi_avg_fn(decay)
        self.values: dict[str, Tensor] = {
            name: parameter.detach().clone(memory_format=torch.contiguous_format).float()
            for name, parameter in self._parameters.items()
        }

    def update(self) -> None:
        """Add the present weights to the average."""
        averages, weights = ([_local(t) for t in part.values()] for part in (self.values, self._parameters))
        self._averaged(averages, weights, 0)

    def move(self, device: torch.device) -> None:
        """Move the average to a device."""
        self.values = {name: value.to(device) for name, value in self.values.items()}


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
