"""Record of a kernel: the bytes that it moves, and its operations, launches and waits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Work(StrEnum):
    """The unit that limits a kernel's arithmetic; ``MEMORY`` is a kernel whose operations never matter.

    ``OWN_MATMUL`` is a matmul of Hone's own Triton programs, with what follows it in the same program.
    """

    MEMORY = "memory"
    MATMUL = "matmul"
    MATMUL_FLOAT32 = "float32 matmul"
    OWN_MATMUL = "own matmul"
    ATTENTION = "attention"
    ATTENTION_BACKWARD = "attention backward"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One call of an operator on the GPU, or a wait of the host.

    Attributes:
        name: of the operator, without namespace and overload.
        where: function that called it; of a backward pass the name of autograd's node.
        moved: bytes that it reads and writes.
        operations: floating-point operations of matmuls and attention, 0 for everything else.
        work: the unit that computes them.
        launches: CUDA kernels that it consists of.
        waits: whether the host waits until the GPU has done all before it.
        in_graph: whether it is part of a CUDA graph, which the host launches once.
    """

    name: str
    where: str
    moved: float = 0.0
    operations: float = 0.0
    work: Work = Work.MEMORY
    launches: int = 1
    waits: bool = False
    in_graph: bool = False


def launches_of(kernels: Iterable[Kernel]) -> int:
    """Return the number of CUDA kernels."""
    return sum(kernel.launches for kernel in kernels)


def host_launches_of(kernels: Iterable[Kernel]) -> int:
    """Return how often the host launches something; consecutive kernels of a graph are one launch."""
    launches, in_graph = 0, False
    for kernel in kernels:
        launches += kernel.launches if not kernel.in_graph else not in_graph
        in_graph = kernel.in_graph
    return launches


def waits_of(kernels: Iterable[Kernel]) -> int:
    """Return how often the host waits for the GPU."""
    return sum(kernel.waits for kernel in kernels)


def operations_of(kernels: Iterable[Kernel]) -> float:
    """Return the operations of matmuls and attention."""
    return sum(kernel.operations for kernel in kernels)


def moved_of(kernels: Iterable[Kernel]) -> float:
    """Return the bytes read and written."""
    return sum(kernel.moved for kernel in kernels)
