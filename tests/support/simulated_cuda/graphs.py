"""CUDA graphs of the simulated GPU, and copies that arrive when the host waits.

A capture notes each operator with its arguments and results, and changes no tensor that existed before, as on CUDA. A replay computes
them again in the same memory: what a graph does not read from fixed addresses, it does not see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from gpu_simulation.operators import caller
from support.simulated_cuda.counters import COUNTERS
from torch import Tensor
from torch.utils._pytree import tree_flatten


class SimulatedGraph:
    """A graph: ``torch.cuda.CUDAGraph`` with the methods that Hone uses."""

    def __init__(self) -> None:
        self._operators: list[tuple[Callable[[], Any], list[Tensor]]] = []
        self._made: set[int] = set()

    def note(self, compute: Callable[[], Any], written: list[Tensor], sources: list[Tensor]) -> Any:
        """Note an operator and return its results, of which only the shapes matter until a replay.

        Args:
            compute: computes it on the host.
            written: tensors that it changes.
            sources: tensors that it reads or changes.
        """
        if any(_storage(tensor) not in self._made for tensor in written):
            self._operators.append((compute, []))
            return written[0]
        result = compute()
        read = {_storage(tensor) for tensor in sources}
        made = [x for x in tree_flatten(result)[0] if isinstance(x, Tensor) and _storage(x) not in read]
        self._made |= {_storage(tensor) for tensor in made}
        self._operators.append((compute, made))
        return result

    def end(self) -> None:
        """End the capture: nothing has been computed yet."""
        for _, made in self._operators:
            for tensor in made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1 if tensor.dtype.is_signed else 1)

    def replay(self) -> None:
        """Compute all operators again, in the memory of the capture."""
        COUNTERS.launches[f"graph in {caller()}"] += 1
        for compute, made in self._operators:
            result = compute()
            if made:
                for tensor, new in zip(
                    made, (x for x in tree_flatten(result)[0] if isinstance(x, Tensor)), strict=True
                ):
                    tensor.copy_(new)

    def pool(self) -> tuple[int, int]:
        """Return the name of its memory."""
        return (0, 0)


CAPTURE: list[SimulatedGraph] = []
"""The graph that is being captured, if there is one."""


@contextlib.contextmanager
def capture(graph: SimulatedGraph, pool: Any = None, stream: Any = None, **modes: Any) -> Iterator[None]:
    """Capture what the block computes: ``torch.cuda.graph``."""
    assert not CAPTURE, "another capture is under way"
    CAPTURE.append(graph)
    try:
        yield
    finally:
        CAPTURE.clear()
    graph.end()


def refuse_in_capture(what: str) -> None:
    """Refuse what CUDA does not permit during a capture.

    Raises:
        RuntimeError: a graph is being captured.
    """
    if CAPTURE:
        raise RuntimeError(f"operation not permitted when stream is capturing: {what} in {caller()}")


_COPIES: list[tuple[Tensor, Tensor]] = []
"""Copies to the host that are under way: (memory of the host, numbers)."""


def begin_copy(target: Tensor, source: Tensor) -> None:
    """Begin an asynchronous copy to the host; until the host waits, the numbers are others."""
    target.fill_(-77)
    _COPIES.append((target, source.clone()))


def copies_under_way() -> list[tuple[Tensor, Tensor]]:
    """Return the copies that have not arrived."""
    return list(_COPIES)


def finish_copies(count: int | None = None) -> None:
    """Finish the first copies that are under way, or all."""
    for target, source in _COPIES[:count]:
        target.copy_(source)
    del _COPIES[:count]


def arrive_before_reading(source: Tensor) -> None:
    """Finish the copies to memory that the device itself reads: on a stream they are done by then."""
    if any(_storage(target) == _storage(source) for target, _ in _COPIES):
        finish_copies()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
