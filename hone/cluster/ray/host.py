"""Worker process: it holds the roles of its pool, and answers calls on them."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ray
import torch

import hone
from hone.cluster.columns import decode, decode_named, encode_named, stored
from hone.cluster.context import RoleSpec, WorkerContext, prepare_torch
from hone.cluster.dispatch import Collect, RemoteTensors, dispatched
from hone.cluster.failures import PeersUnreachable
from hone.cluster.remote_batch import LayerPart, Shard
from hone.config.parallel import Layout
from hone.config.trees import AnyConfig
from hone.data.batch import Batch
from hone.insight import activity
from hone.models.kernels.cpu.memory import MemoryUse
from hone.startup import quiet_imports
from hone.training.layout import build_meshes, join_ranks, meeting_store
from hone.user_objects import UserObject, receive_objects

log = logging.getLogger("hone")

COMPARED = ("torch", "transformers", "numpy")
"""Packages whose version influences numbers or unpickling."""


@dataclass(frozen=True)
class WorkerPlace:
    """Place of a worker in the run, and the data that it needs to start.

    Attributes:
        pool: name of its pool.
        rank: rank in the pool.
        world: number of processes of the pool.
        layout: division of a model over them.
        shares_models: whether they share models; otherwise each works alone.
        meeting: address at which the processes of the pool connect.
        threads: CPU threads.
        directory: working directory of the driver, for paths and modules of the user.
        modules: import paths of the driver.
        objects: functions and classes of the driver's user, which the configuration names.
        engine_devices: see :class:`~hone.cluster.context.WorkerContext`.
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
    objects: Sequence[UserObject]
    engine_devices: tuple[str, ...] | None


@dataclass(frozen=True)
class WorkerFacts:
    """Report of a process before it begins.

    Attributes:
        versions: of the compared packages.
        address: free address on its machine.
        gpus: GPUs that Ray gave it, as in CUDA_VISIBLE_DEVICES.
    """

    versions: dict[str, str]
    address: str
    gpus: tuple[str, ...]


def versions() -> dict[str, str]:
    """Return the versions that must be equal in all processes of a run."""
    installed = {"hone": hone.__version__, "python": platform.python_version()}
    for name in COMPARED:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = "none"
    return installed


class WorkerHost:
    """Process of a worker. Ray makes it an actor; :class:`~hone.cluster.ray.runtime.RayGroup` calls its methods."""

    def __init__(self) -> None:
        self._context: WorkerContext[Any] | None = None
        self._fetched: dict[Any, dict[str, Any]] = {}

    # beginning -------------------------------------------------------------------------------------------------------

    async def facts(self) -> WorkerFacts:
        """Return versions, a free address on this machine, and the GPUs that Ray gave the process."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return WorkerFacts(versions(), f"{ray.util.get_node_ip_address()}:{port}", tuple(gpus))

    async def begin(self, place: WorkerPlace, config: AnyConfig, total_steps: int, resume: str | None) -> int:
        """Set directory, threads, device and process groups of the worker. Returns the process id."""
        if Path(place.directory).is_dir():
            os.chdir(place.directory)
        sys.path += [entry for entry in place.modules if entry not in sys.path]
        receive_objects(place.objects)
        logging.getLogger("hone").setLevel(logging.INFO)
        quiet_imports()
        logging.basicConfig(format=f"{place.pool}[{place.rank}] %(levelname)s %(message)s")
        activity.begin(Path(place.run) / activity.FOLDER, place.pool, place.rank)
        device = prepare_torch(config.trainer, threads=place.threads)
        meshes = None
        if place.shares_models:
            with activity.waiting("all workers of the pool", on=[place.pool]):
                try:
                    store = meeting_store(place.meeting, place.rank, place.world)
                    join_ranks(device, store, place.rank, place.world)
                    meshes = build_meshes(place.layout, device.type)
                except torch.distributed.DistNetworkError as error:
                    raise PeersUnreachable(
                        f"{place.pool}[{place.rank}] cannot connect to the others at {place.meeting}: {str(error).splitlines()[0]}",
                        why="one of them was lost; or another process took the port, which was free a moment ago; or a firewall "
                        "separates the nodes",
                        fix="run the same command again; or open the ports between the nodes (docs/cluster.md)",
                    ) from error
        self._memory = MemoryUse()
        self._context = WorkerContext(
            config,
            device,
            place.rank,
            place.layout,
            meshes,
            world=place.world,
            total_steps=total_steps,
            resume=resume,
            engine_devices=place.engine_devices,
            host=ray.util.get_node_ip_address(),
        )
        return os.getpid()

    async def build(self, role: RoleSpec) -> None:
        """Build a role."""
        with activity.doing(f"building {role.name}"):
            self._worker.roles[role.name] = role.cls(self._worker, **role.arguments)

    # calls -----------------------------------------------------------------------------------------------------------

    async def call(self, role: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a method of a role. Batches arrive as shards and leave as references."""
        args = [await self._resolved(argument) for argument in args]
        kwargs = {name: await self._resolved(argument) for name, argument in kwargs.items()}
        bound_method, spec = (
            getattr(self._worker.roles[role], method),
            dispatched(type(self._worker.roles[role]))[method],
        )
        with activity.doing(f"{role}.{method}"):
            if spec.background:
                result = await asyncio.to_thread(bound_method, *args, **kwargs)
            else:
                result = bound_method(*args, **kwargs)
            if inspect.isawaitable(result):
                result = await result
        if spec.collect is Collect.REMOTE and result is not None:
            return RemoteTensors(ray.put(encode_named(result))) if self._worker.rank == 0 else None
        return stored(result, ray.put) if isinstance(result, Batch) else result

    async def begin_step(self, seed: int) -> None:
        """Seed torch, and release the columns of the last step."""
        torch.manual_seed(seed)
        self._fetched.clear()

    async def memory(self) -> dict[str, float]:
        """Return the memory that this process has used."""
        return self._memory()

    async def end(self) -> None:
        """Close and release the roles, and what a :meth:`begin` that failed half way has made; :meth:`begin` may follow."""
        if self._context is not None:
            self._context.close_roles()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        self._context = None
        self._fetched.clear()
        gc.collect()
        activity.end()

    @property
    def _worker(self) -> WorkerContext[Any]:
        assert self._context is not None, "begin() must be called first"
        return self._context

    async def _resolved(self, argument: Any) -> Any:
        if isinstance(argument, RemoteTensors):
            return decode_named(await argument.ref)
        if not isinstance(argument, Shard):
            return argument
        columns: dict[str, Any] = {}
        for part_of_layer in argument.layers:
            columns |= await self._columns(part_of_layer)
        return Batch({**columns, "uid": argument.uids}, **argument.meta)

    async def _columns(self, layer: LayerPart) -> dict[str, Any]:
        """Return the columns of a layer, under their names in the batch."""
        return layer.columns(await asyncio.gather(*(self._block(block.ref) for block in layer.blocks)))

    async def _block(self, ref: Any) -> dict[str, Any]:
        """Return the columns of a block; cached until the next step, for stages that need them again."""
        if ref not in self._fetched:
            self._fetched[ref] = decode(await ref)
        return self._fetched[ref]
