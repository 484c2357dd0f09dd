"""A rank's roles, and the loop in which ranks other than the first answer calls."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hone.cluster.columns import assembled, stored
from hone.cluster.context import RoleSpec, WorkerContext, prepare_torch
from hone.cluster.dispatch import dispatch_of
from hone.cluster.remote_batch import Shard
from hone.cluster.torchrun.channel import Link, answering_end, receive, send
from hone.cluster.torchrun.ranks import LaunchedRank
from hone.config.parallel_layout import Layout
from hone.config.trees import AnyConfig
from hone.data.batch import Batch
from hone.insight import activity
from hone.models.kernels.cpu.memory import MemoryUse
from hone.training.layout import build_meshes
from hone.training.rendezvous import join_ranks

POOL = "main"
"""Name of the only pool of ranks."""


class RankWorker:
    """Roles of a rank.

    Args:
        launched: this process.
    """

    def __init__(self, launched: LaunchedRank) -> None:
        self.launched = launched

    def begin(self, config: AnyConfig, layout: Layout, meeting: str, total_steps: int, resume: str | None) -> None:
        """Set threads and device, and join the other ranks at ``meeting``. Collective."""
        launched = self.launched
        if torch.cuda.is_available() and config.trainer.device != "cpu":
            torch.cuda.set_device(launched.local_rank)
        threads = max(1, len(os.sched_getaffinity(0)) // launched.local_world)
        device = prepare_torch(config.trainer, threads=threads)
        meshes = None
        if launched.world > 1:
            join_ranks(device, meeting, launched.rank, launched.world)
            meshes = build_meshes(layout, device.type)
        self._memory = MemoryUse()
        self.context: WorkerContext[Any] = WorkerContext(
            config,
            device,
            launched.rank,
            layout,
            meshes,
            world=launched.world,
            total_steps=total_steps,
            resume=resume,
        )

    def build(self, role: RoleSpec) -> None:
        """Build a role. Collective."""
        with activity.doing(f"building {role.name}"):
            self.context.roles[role.name] = role.cls(self.context, **role.arguments)

    def call(self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of a role. Batches arrive as shards and leave as stored columns."""
        sent = [assembled(argument, list) if isinstance(argument, Shard) else argument for argument in args]
        with activity.doing(f"{role}.{method}"):
            result = getattr(self.context.roles[role], method)(*sent, **kwargs)
        return stored(result, lambda columns: columns) if isinstance(result, Batch) else result

    def runs_aside(self, role: str, method: str) -> bool:
        """Return whether a call runs in a thread while others are answered."""
        return dispatch_of(type(self.context.roles[role]), method).background

    def begin_step(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def memory(self) -> dict[str, float]:
        """Return the memory that this process has used."""
        return self._memory()

    def end(self) -> None:
        """Release the roles."""
        self.context.roles.clear()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def serve() -> int:
    """Answer calls of rank 0 until it ends; return the exit code.

    Signals to stop are left to rank 0, which saves with the help of all ranks.
    """
    launched = LaunchedRank.from_environment()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(format=f"{POOL}[{launched.rank}] %(levelname)s %(message)s")
    connection = answering_end(launched)
    run = receive(connection)
    activity.begin(Path(run) / activity.FOLDER, POOL, launched.rank)
    try:
        return _answer_calls(RankWorker(launched), connection)
    finally:
        activity.end()


def _answer_calls(worker: RankWorker, connection: Link) -> int:
    lock = threading.Lock()

    def answer(number: int, name: str, arguments: Sequence[Any]) -> bool:
        try:
            result, failed = getattr(worker, name)(*arguments), False
        except Exception as error:  # noqa: BLE001 - rank 0 raises it
            error.add_note(f"It was raised in {POOL}[{worker.launched.rank}]:\n{traceback.format_exc()}")
            result, failed = _portable(error), True
        with lock:
            send(connection, (number, failed, result))
        return failed

    while True:
        try:
            number, name, *arguments = receive(connection)
        except EOFError:
            return 0
        if name == "call" and worker.runs_aside(*arguments[:2]):
            threading.Thread(target=answer, args=(number, name, arguments), daemon=True).start()
        elif answer(number, name, arguments) and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # the others would wait for this rank in their collectives


def _portable(error: Exception) -> Exception:
    """Return an exception that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever is wrong with it
        return RuntimeError("\n".join([f"{type(error).__name__}: {error}", *error.__notes__]))
    return error
