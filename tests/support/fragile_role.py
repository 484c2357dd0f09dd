"""A role that comes to grief in every way; worker processes import this file."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import ray
import torch

from hone.cluster.context import WorkerContext
from hone.cluster.dispatch import Collect, Split, dispatch
from hone.errors import ConfigError


class Fragile:
    """What a call asks of one rank happens there; the other ranks wait for it in a collective."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    @dispatch(Split.ALL, Collect.EACH)
    def facts(self) -> tuple[int, str | None]:
        """Process and checkpoint of every worker."""
        return os.getpid(), self.context.resume

    @dispatch(Split.ALL, Collect.EACH)
    def places(self) -> tuple[int, str | None, str]:
        """Process, checkpoint and node of every worker."""
        return *self.facts(), ray.get_runtime_context().get_node_id()

    @dispatch(Split.ALL, Collect.EACH)
    def suffer(self, what: str) -> None:
        """Rank 1 suffers, rank 0 waits for it."""
        if self.context.rank == 1:
            sys.stderr.write(f"about to {what}\n")
            sys.stderr.flush()
            getattr(self, what)()
        torch.distributed.all_reduce(torch.zeros(1))

    def be_killed(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def crash(self) -> None:
        ctypes.string_at(0)

    def exit(self) -> None:
        os._exit(7)

    def make_a_mistake(self) -> None:
        raise ConfigError("heads=3 do not divide", why="a rank would be idle", fix="heads=4", code="R71", where="model")

    def have_a_bug(self) -> None:
        self.a_function_of_the_user({})

    def a_function_of_the_user(self, found: dict[str, int]) -> int:
        return found["missing key"]

    def want_too_much_memory(self) -> None:
        torch.empty(2**60, dtype=torch.uint8)
