"""A ring of threads: ring attention of many ranks in one process, without process groups."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from support.patience import LONG
from torch import Tensor


class ThreadRing:
    """One rank of a ring, whose messages go through queues.

    Args:
        rank: this rank.
        queues: of all ranks, by rank and channel; a rank takes messages from its queues.
    """

    def __init__(self, rank: int, queues: list[list[queue.Queue[list[Tensor] | None]]]) -> None:
        self.rank, self.size, self._queues = rank, len(queues), queues
        self.sent = 0

    def shift(self, tensors: Sequence[Tensor], channel: int) -> Callable[[], list[Tensor]]:
        self.sent += sum(tensor.numel() for tensor in tensors)
        self._queues[(self.rank + 1) % self.size][channel].put([tensor.clone() for tensor in tensors])

        def wait() -> list[Tensor]:
            received = self._queues[self.rank][channel].get(timeout=LONG)
            if received is None:
                raise RuntimeError("another rank failed")
            return received

        return wait


def on_ring(ranks: int, function: Callable[[ThreadRing], Any]) -> list[Any]:
    """Call ``function`` on each rank of a ring, in a thread each; the results, by rank.

    Raises:
        the exception of the first rank that raised.
    """
    queues: list[list[queue.Queue[list[Tensor] | None]]] = [[queue.Queue(), queue.Queue()] for _ in range(ranks)]
    results: list[Any] = [None] * ranks
    failures: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = function(ThreadRing(rank, queues))
        except BaseException as failure:  # noqa: BLE001  raised below
            failures.append(failure)
            for waiting in (channel for channels in queues for channel in channels):
                waiting.put(None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
