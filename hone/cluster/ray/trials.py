"""Independent tasks on a Ray cluster, for the trials of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray

from hone.cluster.ray.connection import connect
from hone.config.run import RayConfig


def run_tasks(
    function: Callable[[Any], Any], items: Sequence[Any], *, cpus: float, gpus: float, address: str | None
) -> Iterator[tuple[int, Any]]:
    """Call a function for every item, each in a task of its own, and yield results in the order in which they end.

    Args:
        function: importable on the nodes.
        items: one argument per task.
        cpus: cores of a task.
        gpus: GPUs of a task.
        address: ``ray.address``; None starts Ray on this machine.

    Yields:
        Index of the item, and the result.

    Raises:
        ConfigError: the address does not answer.
    """
    connection = connect(RayConfig(address=address), workers=1)
    try:
        remote = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=0)(function)
        pending = {remote.remote(item): index for index, item in enumerate(items)}
        while pending:
            (ended, *_), _ = ray.wait(list(pending), num_returns=1)
            index = pending.pop(ended)
            yield index, ray.get(ended)
    finally:
        connection.close()
