"""One worker process: it holds the roles of its pool, and answers calls on them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import platform
import socket
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
import torch

import hone
from hone.cluster.context import RoleSpec, WorkerContext, prepare_torch
from hone.cluster.dispatch import Collect, Kept, dispatch_of
from hone.cluster.ray.columns import decode, decode_named, encode, encode_named
from hone.cluster.remote_batch import Piece, RowInfo, Shard, Stored
from hone.config.reads import watch
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.errors import ProcessError
from hone.insight import activity
from hone.training.layout import Layout
from hone.training.memory import MemoryUse

log = logging.getLogger("hone")

COMPARED = ("torch", "transformers", "numpy")
"""Packages whose version decides about numbers, or about what can be unpickled."""


@dataclass(frozen=True)
class Place:
    """Where a worker stands, and what it needs to begin.

    Attributes:
        pool: name of its pool.
        rank: in the pool.
        world: processes of the pool.
        layout: how they share a model.
        shares_models: whether they do; otherwise each works alone.
        meeting: address at which the processes of the pool find each other.
        threads: CPU threads.
        directory: working directory of the driver, for paths and modules of the user.
        modules: where the driver looks for modules.
        run: the run directory.
    """

    pool: str
    rank: int
    world: int
    layout: Layout
    shares_models: bool
    meeting: str
    threads: int
    directory: str
    modules: Sequence[str]
    run: str


def versions() -> dict[str, str]:
    """What must be the same in all processes of a run."""
    found = {"hone": hone.__version__, "python": platform.python_version()}
    for name in COMPARED:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


class WorkerHost:
    """The process. Ray makes it an actor; its methods are called by :class:`~hone.cluster.ray.group.WorkerGroup`."""

    def __init__(self) -> None:
        self._context: WorkerContext | None = None
        self._fetched: dict[Any, dict[str, Any]] = {}

    # beginning -------------------------------------------------------------------------------------------------------

    async def facts(self) -> tuple[dict[str, str], str]:
        """Versions, and an address on this machine that is free."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        return versions(), f"{ray.util.get_node_ip_address()}:{port}"

    async def begin(self, place: Place, config: RLConfig, total_steps: int, resume: str | None) -> int:
        """Take the place: directory, threads, device, process groups. Returns the process id."""
        if Path(place.directory).is_dir():
            os.chdir(place.directory)
        sys.path += [entry for entry in place.modules if entry not in sys.path]
        logging.getLogger("hone").setLevel(logging.INFO)
        logging.basicConfig(format=f"{place.pool}[{place.rank}] %(levelname)s %(message)s")
        # PEFT and torch read a property that transformers renamed
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        activity.begin(Path(place.run) / activity.FOLDER, place.pool, place.rank)
        device = prepare_torch(config.trainer, threads=place.threads)
        meshes = None
        if place.shares_models:
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            address = f"tcp://{place.meeting}"
            with activity.waiting("all workers of the pool", on=[place.pool]):
                try:
                    torch.distributed.init_process_group(
                        backend, init_method=address, rank=place.rank, world_size=place.world
                    )
                except torch.distributed.DistNetworkError as error:
                    raise ProcessError(
                        f"{place.pool}[{place.rank}] cannot meet the others at {place.meeting}: {str(error).splitlines()[0]}",
                        why="the port was free a moment ago, so another process took it; or a firewall stands between the nodes",
                        fix="the same command again; or open the ports between the nodes (docs/cluster.md)",
                    ) from error
            meshes = place.layout.meshes(device.type)
        self._memory = MemoryUse()
        self._reads = watch(config)
        self._context = WorkerContext(
            config,
            device,
            place.rank,
            place.layout,
            meshes,
            world=place.world,
            total_steps=total_steps,
            resume=resume,
        )
        return os.getpid()

    async def build(self, role: RoleSpec) -> None:
        """Make a role."""
        with activity.doing(f"making {role.name}"):
            self._held.roles[role.name] = role.cls(self._held, **role.arguments)

    # calls -----------------------------------------------------------------------------------------------------------

    async def call(self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of a role. Batches arrive as shards and leave as references."""
        args = [await self._arrived(argument) for argument in args]
        kwargs = {name: await self._arrived(argument) for name, argument in kwargs.items()}
        asked, spec = getattr(self._held.roles[role], method), dispatch_of(type(self._held.roles[role]), method)
        with activity.doing(f"{role}.{method}"):
            if spec.background:
                result = await asyncio.to_thread(asked, *args, **kwargs)
            else:
                result = asked(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        if spec.collect is Collect.KEPT and result is not None:
            return Kept(ray.put(encode_named(result))) if self._held.rank == 0 else None
        return stored(result) if isinstance(result, Batch) else result

    async def begin_step(self, seed: int) -> None:
        """Seed torch, and let the columns of the last step go."""
        torch.manual_seed(seed)
        self._fetched.clear()

    async def reads(self) -> set[str]:
        """The keys of the configuration that this process has read."""
        self._reads.stop()
        return self._reads.read

    async def memory(self) -> dict[str, float]:
        """What this process has held."""
        return self._memory()

    async def end(self) -> None:
        """Let go of the roles, which end what they have started; :meth:`begin` may follow."""
        if self._context is None:
            return
        for role in reversed(list(self._held.roles.values())):
            if hasattr(role, "close"):
                role.close()
        self._held.roles.clear()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._context = None
        self._fetched.clear()
        gc.collect()
        activity.end()

    @property
    def _held(self) -> WorkerContext:
        assert self._context is not None, "begin() comes first"
        return self._context

    async def _arrived(self, argument: Any) -> Any:
        if isinstance(argument, Kept):
            return decode_named(await argument.ref)
        if not isinstance(argument, Shard):
            return argument
        columns: dict[str, Any] = {}
        for piece in argument.pieces:
            columns |= await self._columns(piece)
        return Batch({**columns, "uid": argument.uids}, **argument.meta)

    async def _columns(self, piece: Piece) -> dict[str, Any]:
        """The columns of one piece, under their names in the batch."""
        inside = list(dict.fromkeys(piece.names.values()))
        blocks = await asyncio.gather(*(self._block(block.ref) for block in piece.blocks))
        parts = [Batch({name: columns[name] for name in inside}) for columns in blocks]
        whole = parts[0] if len(parts) == 1 else Batch.concat(parts)
        if piece.index is not None:
            starts = torch.tensor([0, *(block.size for block in piece.blocks)]).cumsum(0)
            block, row = piece.index
            rows = torch.tensor(row)
            whole = whole.reorder(rows if block is None else rows + starts[torch.tensor(block)])
        return {name: whole[old] for name, old in piece.names.items()}

    async def _block(self, ref: Any) -> dict[str, Any]:
        """The columns of a block; kept until the next step, for stages that need the same."""
        if ref not in self._fetched:
            self._fetched[ref] = decode(await ref)
        return self._fetched[ref]


def stored(batch: Batch) -> Stored:
    """Put a batch into the object store: tensors in one object, Python objects in another, so that who needs only the
    tensors fetches only them. ``uid`` goes to the driver."""
    tensors = tuple(name for name in batch.names() if not isinstance(batch[name], list))
    objects = tuple(name for name in batch.names() if isinstance(batch[name], list) and name != "uid")
    own_rows = "uid" in batch and "prompt_ids" in batch
    return Stored(
        (tensors, objects),
        (_put(batch, tensors), _put(batch, objects)),
        len(batch),
        RowInfo.of(batch) if own_rows else None,
        batch.meta,
    )


def _put(batch: Batch, names: Sequence[str]) -> Any:
    return ray.put(encode({name: batch[name] for name in names})) if names else None
