"""Seconds of recorded kernels on a device: one stream, one host thread that launches into it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpu_simulation.kernels import Kernel, Work
from hone.preflight.plan.devices import Device

SHORTEST = 2e-6
"""Seconds that a kernel takes at least on the GPU."""
WAIT = 10e-6
"""Seconds from the end of the GPU's work until the host, which waited for it, continues."""
SHARE_OF_MATMULS = {Work.ATTENTION: 0.6, Work.ATTENTION_BACKWARD: 0.5, Work.OWN_MATMUL: 0.8}
"""Speed divided by that of cuBLAS's large matmuls; attention for heads of width 128 and a thousand tokens."""


class Timeline(NamedTuple):
    """Seconds of a sequence of kernels.

    Attributes:
        total: from the first launch to the end of the last kernel.
        busy: in which the GPU computes.
        host: that the launches take on the host.
    """

    total: float
    busy: float
    host: float


def duration(kernel: Kernel, device: Device) -> float:
    """Return the seconds of a kernel on the GPU: its bytes at the device's bandwidth, or its operations at its rate."""
    if not kernel.launches:
        return 0.0
    computing = kernel.operations / _rate(kernel.work, device) if kernel.operations else 0.0
    return max(kernel.moved / device.bandwidth, computing, kernel.launches * SHORTEST)


def timeline(kernels: Iterable[Kernel], device: Device) -> Timeline:
    """Return the seconds of kernels in order. The host runs ahead of the GPU, except where it waits for it."""
    host = finished = busy = launching = 0.0
    in_graph = False
    for kernel in kernels:
        seconds = duration(kernel, device)
        launches = kernel.launches if not kernel.in_graph else not in_graph
        in_graph = kernel.in_graph
        host += launches * device.launch
        launching += launches * device.launch
        if kernel.launches:
            finished = max(finished, host) + seconds
            busy += seconds
        if kernel.waits:
            host = max(host, finished) + WAIT
    return Timeline(max(host, finished), busy, launching)


class Recording(NamedTuple):
    """A pass, recorded for models of one and of two layers; both together say what any number of layers takes.

    Attributes:
        one: kernels of the model with one layer.
        two: kernels of the model with two.
    """

    one: Sequence[Kernel]
    two: Sequence[Kernel]

    def seconds(self, device: Device, layers: int, *, head: bool = True) -> float:
        """Return the seconds of a model with ``layers`` layers; without ``head`` those of the layers alone."""
        one, two = (timeline(kernels, device).total for kernels in self)
        layer = max(0.0, two - one)
        return layers * layer + (max(0.0, one - layer) if head else 0.0)

    def kernels(self, layers: int) -> list[Kernel]:
        """Return the kernels of a model with ``layers`` layers, not in their order."""
        one, two = Counter(self.one), Counter(self.two)
        counts = {kernel: one[kernel] + (layers - 1) * (two[kernel] - one[kernel]) for kernel in one | two}
        return [kernel for kernel, count in counts.items() for _ in range(count)]


class Share(NamedTuple):
    """Kernels of one kind together."""

    name: str
    where: str
    calls: int
    moved: float
    operations: float
    seconds: float


def most_expensive(kernels: Iterable[Kernel], device: Device) -> list[Share]:
    """Return the kernels by name and caller, the most expensive first."""
    sums: defaultdict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for kernel in kernels:
        entry = sums[kernel.name, kernel.where]
        for index, value in enumerate((1, kernel.moved, kernel.operations, duration(kernel, device))):
            entry[index] += value
    shares = [Share(*key, int(count), *rest) for key, (count, *rest) in sums.items()]
    return sorted(shares, key=lambda share: -share.seconds)


def _rate(work: Work, device: Device) -> float:
    if work is Work.MATMUL_FLOAT32:
        return device.wide_rate
    return device.narrow_rate * SHARE_OF_MATMULS.get(work, 1.0)
