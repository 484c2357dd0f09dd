"""Real processes that work in step, started once and used by many tests.

A rank is a forked process in a gloo group; it runs functions of importable modules and returns what they return. When a rank
raises, does not answer in time, or has made many process groups, all are killed and the next call starts new ones.
"""

from __future__ import annotations

import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from support.launch import context
from support.patience import LONG

GROUPS = 16
"""Most process groups that ranks keep between calls; each has threads that wake a hundred times a second until its process ends."""


class Ranks:
    """``world`` processes with a default process group of gloo.

    >>> with Ranks(2) as ranks:
    ...     ranks.run(os.getpid)
    """

    def __init__(self, world: int) -> None:
        self.world = world
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = LONG, **kwargs: Any) -> list[Any]:
        """Call ``function`` on every rank at once; its results, by rank.

        Raises:
            RuntimeError: a rank raised (with its traceback) or did not answer in ``timeout`` seconds.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((function, args, kwargs)))
        results: dict[int, Any] = {}
        groups = 0
        deadline = time.monotonic() + timeout
        while len(results) < self.world:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in results}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.stop()
                raise RuntimeError(f"ranks {sorted(waiting.values())} did not answer in {timeout} s")
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    failed, answer, groups = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    failed, answer = True, "it died"
                if failed:
                    self.stop()
                    raise RuntimeError(f"rank {rank} failed: {answer}")
                results[rank] = answer
        if groups > GROUPS:
            self.stop()
        return [results[rank] for rank in range(self.world)]

    def stop(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        meeting = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self.world):
            ours, theirs = context().Pipe()
            process = context().Process(target=_serve, args=(theirs, rank, self.world, str(meeting)), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


def _serve(pipe: Connection, rank: int, world: int, meeting: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    while True:
        try:
            function, args, kwargs = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            return
        try:
            answer = (False, function(*args, **kwargs))
        except Exception:  # noqa: BLE001  the caller raises it
            answer = (True, traceback.format_exc())
        answer = (*answer, len(dist.distributed_c10d._world.pg_map))
        pipe.send_bytes(pickle.dumps(answer))
