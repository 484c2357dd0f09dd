"""Ray runtime: connect to or start a cluster, place one process per device, and build the roles in them."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer
from hone.cluster.failures import (
    PeersUnreachable,
    is_broken_collective,
    is_out_of_memory,
    log_tail,
    out_of_memory,
    worker_lost,
)
from hone.cluster.group import Arguments, WorkerGroup, WorkerRuntime
from hone.cluster.plan import place
from hone.cluster.ray.connection import Connection, capacity, connect
from hone.cluster.ray.host import WorkerHost, WorkerPlace, versions
from hone.config.derived import check_judge
from hone.config.parallel import Layout
from hone.config.pools import Pool, check_engines, check_layouts
from hone.config.trees import AnyConfig
from hone.data.balance import CostModel
from hone.errors import ConfigError, HoneError, ProcessError
from hone.insight import activity
from hone.insight.activity import Record, read_records
from hone.insight.environment import oom_kills
from hone.user_objects import objects_in_use

GRACE = 10.0
"""Seconds that the other ranks of a failed call have to report their errors."""

_LOST = (RayActorError, ObjectLostError, WorkerCrashedError, OutOfMemoryError)
_MARKS = (":job_id:", ":actor_name:", ":task_name:", "Extension modules: ", "[20")
"""Lines of Ray and the interpreter in workers' logs, which carry no information about their work."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class PendingCall:
    """A call to one process.

    Attributes:
        name: name of the process, ``pool[rank]``.
        ref: its pending result.
    """

    name: str
    ref: Any


class Failures:
    """Explain failed calls of one run.

    Args:
        folder: directory of the processes' activity records.
    """

    def __init__(self, config: AnyConfig, folder: Path) -> None:
        self._config, self._folder = config, folder
        self._oom_kills = oom_kills()

    def answers(self, calls: Sequence[PendingCall], timeout: float | None = None) -> list[Any]:
        """Wait for results; errors are raised with their root cause."""
        try:
            return ray.get([call.ref for call in calls], timeout=timeout)
        except RayError as error:
            raise self.explain(calls, error) from None

    def explain(self, calls: Sequence[PendingCall], first: BaseException) -> BaseException:
        """Return the error to raise for a failed call.

        Args:
            calls: calls to the processes.
            first: first reported error.

        Returns:
            A :class:`~hone.cluster.failures.WorkerLost` if a process died, the user's mistake if there is one, else the
            exception as raised in the worker, with its traceback there as a note.
        """
        if isinstance(first, GetTimeoutError):
            return self._late(calls)
        errors = self._errors_by_rank(calls, GRACE if may_be_echo(first) else 0.0) or {calls[0].name: first}
        ranked = sorted(errors.items(), key=lambda item: _rank(item[1]))
        name, error = ranked[0]
        if _is_lost(root(error)):
            return self._lost(name, error)
        return self._raised(name, error)

    def _errors_by_rank(self, calls: Sequence[PendingCall], seconds: float) -> dict[str, BaseException]:
        """Return the error of a call at every rank that failed."""
        done, _ = ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=seconds)
        errors: dict[str, BaseException] = {}
        for call in calls:
            if call.ref in done:
                try:
                    ray.get(call.ref)
                except Exception as error:  # noqa: BLE001 - all kinds are examined, and the root cause is raised
                    errors[call.name] = error
        return errors

    def _late(self, calls: Sequence[PendingCall]) -> BaseException:
        done, _ = ray.wait([call.ref for call in calls], num_returns=len(calls), timeout=0)
        missing = [call.name for call in calls if call.ref not in done]
        return ProcessError(
            f"{', '.join(missing)} did not start within {self._config.ray.start_timeout:g} s (ray.start_timeout)",
            why="a node may be gone or overloaded, or its devices in use; every saved checkpoint is intact",
            fix="check `ray status`; then run the same command again, with fewer workers or a larger ray.start_timeout",
        )

    def _lost(self, name: str, error: BaseException) -> BaseException:
        """Return the error for a lost process: the called one, or the one that stored its inputs."""
        records = {record.name: record for record in read_records(self._folder)}
        if not isinstance(root(error), RayActorError):
            dead = [other for other, record in records.items() if not record.is_alive()]
            name = dead[0] if dead else name
        record = records.get(name)
        log = log_tail(Path(record.log), without=_MARKS) if record and record.log and record.is_here() else ""
        memory = self._for_memory(error)
        return worker_lost(
            name,
            record,
            _cause(error, log, memory),
            config=self._config,
            run_stage=_stage(records),
            out_of_memory=memory,
            log=log,
        )

    def _for_memory(self, error: BaseException) -> bool:
        """Return whether the kernel, or Ray's memory monitor, killed for memory."""
        text = str(error)
        return isinstance(root(error), OutOfMemoryError) or "low on memory" in text or oom_kills() > self._oom_kills

    def _raised(self, name: str, error: BaseException) -> BaseException:
        """Return an exception of a worker, without Ray's wrapping."""
        cause = root(error)
        if isinstance(cause, HoneError):
            return cause
        if _never_began(cause):
            return _import_failed(name, cause)
        if is_out_of_memory(cause):
            records = {record.name: record for record in read_records(self._folder)}
            return out_of_memory(cause, self._config, f"{_stage(records)} > {name}: {activity.stage_of(cause)}")
        if isinstance(error, RayTaskError):
            cause.add_note(f"It was raised in {name}:\n{plain(str(error))}")
        return cause


def _stage(records: Mapping[str, Record]) -> str:
    """Return the driver's current stage, without its wait for the failed call."""
    driver = records.get("driver")
    return " > ".join(span.what for span in driver.spans if not span.waits) if driver else ""


def may_be_echo(error: BaseException) -> bool:
    """Return whether an error may be a consequence of the death of another process.

    A rank that dies makes its peers fail too (their collective breaks, their inputs are lost), and those often report first.
    """
    cause = root(error)
    return isinstance(cause, PeersUnreachable) or _is_lost(cause) or is_broken_collective(cause)


def root(error: BaseException) -> BaseException:
    """Return the error inside Ray's wrappers."""
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) and error.cause is not error:
        error = error.cause
    return error


def plain(text: str) -> str:
    """Return Ray's text without colours, headings and the marks below lines."""
    lines = _ANSI.sub("", text).rstrip().splitlines()
    return "\n".join(line for line in lines if not line.startswith("ray::") and not re.fullmatch(r"\s*\^+\s*", line))


def _is_lost(cause: BaseException) -> bool:
    return isinstance(cause, _LOST) and not _never_began(cause)


def _never_began(cause: BaseException) -> bool:
    """Return whether the process existed, but could not import its packages."""
    return isinstance(cause, RayActorError) and "error raised in its creation task" in str(cause)


def _import_failed(name: str, cause: BaseException) -> ProcessError:
    lines = [line for line in plain(str(cause)).splitlines() if line.strip()]
    return ProcessError(
        f"{name} could not start: {lines[-1].strip()}\n" + "\n".join(f"    {line}" for line in lines[-12:-1]),
        why="every worker must be able to import what the driver imports",
        fix="install the same environment on every node, or name it in ray.runtime_env",
    )


def _rank(error: BaseException) -> int:
    """Return the order of root causes: the user's mistake, a death, any other exception, a consequence."""
    cause = root(error)
    if isinstance(cause, HoneError) and not isinstance(cause, PeersUnreachable):
        return 0
    if isinstance(cause, RayActorError):
        return 1
    if _is_lost(cause):
        return 2
    return 4 if may_be_echo(error) or isinstance(cause, RayError) else 3


def _cause(error: BaseException, log: str, for_memory: bool) -> str:
    """Return how a process ended, in words."""
    if for_memory:
        return "was killed because memory ran out"
    if "SIGSEGV" in log or "Segmentation fault" in log:
        return "crashed (segmentation fault)"
    if "node" in str(error) and (
        "node died" in str(error) or "node is dead" in str(error) or "node has died" in str(error)
    ):
        return "is lost with its node"
    code = re.search(r"exit code (-?\d+)", str(error))
    return f"ended with exit code {code[1]}" if code else "was killed"


class RayAnswer(Answer[Any]):
    """Pending results of workers, and their combination."""

    def __init__(
        self,
        calls: Sequence[PendingCall],
        finish: Callable[[list[Any]], Any],
        what: str,
        whom: str,
        failures: Failures,
        balance: Callable[[], dict[str, float]],
    ) -> None:
        self._posts, self._finish, self._what, self._whom = list(calls), finish, what, whom
        self._failures, self.balance = failures, balance

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        with activity.waiting(self._what, on=[self._whom]):
            try:
                values = await asyncio.gather(*(post.ref for post in self._posts))
            except RayError as error:
                raise await asyncio.to_thread(self._failures.explain, self._posts, error) from None
        return self._finish(values)

    def result(self) -> Any:
        """Block until all workers have answered."""
        with activity.waiting(self._what, on=[self._whom]):
            return self._finish(self._failures.answers(self._posts))


class RayGroup(WorkerGroup):
    """All workers of a role on Ray.

    Args:
        role, layout, balance, cost: as of :class:`~hone.cluster.group.WorkerGroup`.
        hosts: processes, by rank.
    """

    def __init__(
        self,
        role: RoleSpec,
        hosts: Sequence[Any],
        pool: str,
        layout: Layout,
        failures: Failures,
        *,
        balance: bool = True,
        cost: CostModel | None = None,
    ) -> None:
        super().__init__(role, len(hosts), layout, balance=balance, cost=cost)
        self._hosts, self._pool, self._failures = list(hosts), pool, failures

    def _send(
        self,
        method: str,
        arguments: Mapping[int, Arguments],
        finish: Callable[[list[Any]], Any],
        balance: Callable[[], dict[str, float]],
    ) -> RayAnswer:
        """Call a method on some workers."""
        pending = [
            PendingCall(f"{self._pool}[{rank}]", self._hosts[rank].call.remote(self.role.name, method, sent, named))
            for rank, (sent, named) in arguments.items()
        ]
        return RayAnswer(pending, finish, f"{self.role.name}.{method}", self._pool, self._failures, balance)


log = logging.getLogger("hone")

END_SECONDS = 10.0
"""Seconds that a process has to close its roles."""
EVERY_ROLE = "all"
"""Key of ``ray.env_vars`` that applies to every role."""


@dataclass
class PlacedPool:
    """A pool with its processes.

    Attributes:
        pool: specification of the pool.
        placement: devices that Ray reserved for it.
        hosts: handles of the processes, by rank.
        pids: their process ids.
    """

    pool: Pool
    placement: PlacementGroup
    hosts: list[Any]
    pids: list[int]

    def name(self, rank: int) -> str:
        """Return ``pool[rank]``, the name of a process in reports."""
        return f"{self.pool.name}[{rank}]"

    def call(self, method: str, *args: Any) -> list[PendingCall]:
        """Call a method of every process."""
        return [
            PendingCall(self.name(rank), getattr(host, method).remote(*args)) for rank, host in enumerate(self.hosts)
        ]


class RayRuntime(WorkerRuntime):
    """Worker processes on a Ray cluster, one per device; roles of one pool share them.

    Attributes:
        pools: the placed pools by name.

    Args:
        roles: roles to build, in this order in every process of the role's pool.
        resume: location of the checkpoint to resume from, or None.

    Raises:
        ConfigError: no cluster at the address, too few devices, different versions in the workers, or an indivisible layout.
        HoneError: errors of the roles' constructors.
    """

    def __init__(
        self, config: AnyConfig, roles: Sequence[RoleSpec], *, total_steps: int = 1, resume: str | None = None
    ) -> None:
        super().__init__(config, ray.put, ray.get)
        self._roles = list(roles)
        self._total_steps, self._resume = total_steps, resume
        self._run = Path(config.trainer.default_local_dir).absolute()
        self._failures = Failures(config, self._run / activity.FOLDER)
        self.pools: dict[str, PlacedPool] = {}
        self._objects = [entry.sent() for entry in objects_in_use()]
        pools = place(config, self._roles)
        check_layouts(pools)
        check_engines(config)
        check_judge(config)
        self._device = "CPU" if config.trainer.device == "cpu" else "GPU"
        self._connection: Connection = connect(config.ray, workers=sum(pool.world for pool in pools))
        try:
            if self._device == "GPU" and config.trainer.device == "auto" and not capacity("GPU"):
                self._device = "CPU"
            self._check_devices(pools)
            for pool in pools:
                self.pools[pool.name] = self._start(pool)
            self._make_roles()
        except BaseException:
            self.close()
            raise

    # what the program uses -------------------------------------------------------------------------------------------

    def add(self, role: RoleSpec) -> RayGroup:
        """Build another role in the processes of the actor's pool."""
        self._build(role, next(iter(self.pools.values())))
        return self.group(role.name)

    def begin_step(self, seed: int) -> None:
        """Seed torch in every process, and release the columns of the last step."""
        self._failures.answers([post for placed in self.pools.values() for post in placed.call("begin_step", seed)])

    def memory(self) -> dict[str, dict[str, float]]:
        """Return the memory of every process, by ``pool[rank]``."""
        posts = [post for placed in self.pools.values() for post in placed.call("memory")]
        return dict(zip([post.name for post in posts], self._failures.answers(posts), strict=True))

    # losing workers --------------------------------------------------------------------------------------------------

    def renew(self, resume: str | None) -> None:
        """Replace lost processes, close the roles of the others, and build all roles again from a checkpoint.

        Raises:
            WorkerLost: another worker is lost meanwhile.
        """
        self._resume = resume
        self._groups.clear()
        for placed in self.pools.values():
            lost = [rank for rank, alive in enumerate(self._close_roles(placed)) if not alive]
            for rank in lost:
                ray.kill(placed.hosts[rank])
            if lost:
                self._wait_for_capacity(placed)
            for rank in lost:
                placed.hosts[rank] = self._host(placed.pool, placed.placement, rank)
        self._make_roles()

    def _wait_for_capacity(self, placed: PlacedPool) -> None:
        """Wait until Ray has placed the processes of a lost node on another."""
        limit = self._config.ray.start_timeout
        if not placed.placement.wait(limit):
            raise ProcessError(
                f"no node has capacity for the lost workers of pool '{placed.pool.name}' within {limit:g} s (ray.start_timeout)",
                why="the others cannot continue without them; every saved checkpoint is intact",
                fix="add a node, or run the same command with fewer workers: a checkpoint fits any number of them",
            )

    def kill(self, name: str) -> bool:
        """Kill a process at once; return false if there is none of that name."""
        for placed in self.pools.values():
            for rank, host in enumerate(placed.hosts):
                if placed.name(rank) == name:
                    ray.kill(host)
                    return True
        return False

    def _close_roles(self, placed: PlacedPool) -> list[bool]:
        """Close the roles of every process of a pool; return which of them did."""
        ends = [post.ref for post in placed.call("end")]
        finished, _ = ray.wait(ends, num_returns=len(ends), timeout=END_SECONDS)
        return [ref in finished and _succeeded(ref) for ref in ends]

    def close(self) -> None:
        """End the processes, and the cluster if it was started here."""
        for placed in self.pools.values():
            self._end(placed)
        self.pools.clear()
        self._groups.clear()
        self._connection.close()

    # starting --------------------------------------------------------------------------------------------------------

    def _check_devices(self, pools: Sequence[Pool]) -> None:
        requested = sum(pool.world for pool in pools) * self._config.ray.device_fraction
        present = capacity(self._device)
        if requested > present:
            listed = " + ".join(f"{pool.name} {pool.nodes} x {pool.per_node}" for pool in pools)
            share = self._config.ray.device_fraction
            raise ConfigError(
                f"the run needs {requested:g} {self._device}s ({listed}, {share:g} each), the cluster has {present:g}",
                why="Ray would wait forever for the missing devices",
                fix="use fewer workers (trainer.n_gpus_per_node, trainer.nnodes), or "
                + (
                    "ray.num_cpus=<as many>"
                    if self._device == "CPU"
                    else f"ray.device_fraction={present / requested:.2g}"
                ),
                where="trainer.n_gpus_per_node",
                code="R02",
            )

    def _start(self, pool: Pool) -> PlacedPool:
        """Reserve the devices and start the processes: one bundle per node, so that a node's processes are together."""
        share = self._config.ray.device_fraction
        bundle = {"CPU": pool.per_node * (share if self._device == "CPU" else 1.0)}
        if self._device == "GPU":
            bundle["GPU"] = pool.per_node * share
        strategy = "STRICT_PACK" if pool.nodes == 1 else "STRICT_SPREAD"
        placement = placement_group([bundle] * pool.nodes, strategy=strategy)
        if not placement.wait(self._config.ray.start_timeout):
            remove_placement_group(placement)
            free = ", ".join(f"{n['NodeManagerAddress']}: {n['Resources'].get(self._device, 0):g}" for n in ray.nodes())
            raise ConfigError(
                f"no capacity for pool '{pool.name}' ({pool.nodes} nodes x {bundle}) within "
                f"{self._config.ray.start_timeout:g} s; {self._device}s by node: {free}",
                why="the run starts when every worker has its device",
                fix="use fewer workers per node, wait for other runs on the cluster, or set a larger ray.start_timeout",
                where="trainer.nnodes",
                code="R02",
            )
        return PlacedPool(pool, placement, [self._host(pool, placement, rank) for rank in range(pool.world)], [])

    def _host(self, pool: Pool, placement: PlacementGroup, rank: int) -> Any:
        """Start one process of a pool, on its node."""
        share = self._config.ray.device_fraction
        options = {"num_cpus": share if self._device == "CPU" else 1, "max_concurrency": 64}
        if self._device == "GPU":
            options["num_gpus"] = share
        return (
            ray.remote(WorkerHost)
            .options(
                **options,
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, rank // pool.per_node),
                runtime_env=self._environment(pool, self._threads(pool)),
            )
            .remote()
        )

    def _threads(self, pool: Pool) -> int:
        """Return the number of CPU threads of each process of a pool."""
        cores = len(os.sched_getaffinity(0))
        return self._config.trainer.num_threads or max(1, cores // pool.per_node)

    def _environment(self, pool: Pool, threads: int) -> dict[str, Any]:
        """Return Ray's runtime environment of a pool's processes."""
        config = self._config.ray
        configured = {**config.env_vars.get(EVERY_ROLE, {})}
        for role in pool.roles:
            configured |= config.env_vars.get(role, {})
        defaults = {"OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        merged = defaults | config.runtime_env.get("env_vars", {}) | configured
        return {**config.runtime_env, "env_vars": {name: str(value) for name, value in merged.items()}}

    def _make_roles(self) -> None:
        """Start all processes, and build every role in those of its pool."""
        for placed in self.pools.values():
            self._begin(placed)
        for role in self._roles:
            self._build(role, next(placed for placed in self.pools.values() if role.name in placed.pool.roles))

    def _begin(self, placed: PlacedPool) -> None:
        pool, driver_versions, limit = placed.pool, versions(), self._config.ray.start_timeout
        facts = self._failures.answers(placed.call("facts"), limit)
        for rank, worker in enumerate(facts):
            check_versions(driver_versions, worker.versions, placed.name(rank))
        devices = self._engine_devices(pool, [worker.gpus for worker in facts])
        places = [
            WorkerPlace(
                pool=pool.name,
                rank=rank,
                world=pool.world,
                layout=pool.layout,
                shares_models=pool.divided,
                meeting=facts[0].address,
                threads=self._threads(pool),
                directory=str(Path.cwd()),
                modules=[entry for entry in sys.path if entry] + [str(Path.cwd())],
                run=str(self._run),
                objects=self._objects,
                engine_devices=devices[rank],
            )
            for rank in range(pool.world)
        ]
        begun = [
            PendingCall(placed.name(rank), host.begin.remote(place, self._config, self._total_steps, self._resume))
            for rank, (host, place) in enumerate(zip(placed.hosts, places, strict=True))
        ]
        placed.pids = self._failures.answers(begun, limit)

    def _engine_devices(self, pool: Pool, gpus: Sequence[tuple[str, ...]]) -> list[tuple[str, ...] | None]:
        """Return the GPUs of the engine that each worker starts: those of its group for the first of a group, none for the others.

        Args:
            pool: of the workers.
            gpus: that Ray gave to each worker; empty on CPUs.

        Raises:
            ConfigError: workers of a group share a GPU.
        """
        size = max((role.group for role in self._roles if role.name in pool.roles), default=1)
        if size == 1:
            return [None] * pool.world
        devices: list[tuple[str, ...] | None] = []
        for rank in range(pool.world):
            first = rank // size * size
            group = tuple(gpu for worker in gpus[first : first + size] for gpu in worker)
            if len(set(group)) < len(group):
                raise ConfigError(
                    f"{size} workers of an engine have the GPUs {', '.join(group)}, some of them twice",
                    why="the processes of an engine need a GPU each",
                    fix="ray.device_fraction=1",
                    where="ray.device_fraction",
                    code="R79",
                )
            devices.append(group if rank == first else ())
        return devices

    def _build(self, role: RoleSpec, placed: PlacedPool) -> None:
        self._failures.answers(placed.call("build", role))
        self._groups[role.name] = RayGroup(
            role,
            placed.hosts,
            placed.pool.name,
            placed.pool.layout,
            self._failures,
            **self._division,
        )

    def _end(self, placed: PlacedPool) -> None:
        """End a pool's processes in good order; those that do not answer are killed."""
        late = self._close_roles(placed).count(False)
        if late:
            log.warning("%d workers of pool '%s' did not end in good order", late, placed.pool.name)
        for host in placed.hosts:
            ray.kill(host)
        remove_placement_group(placed.placement)


def _succeeded(ref: Any) -> bool:
    try:
        ray.get(ref)
    except RayError:
        return False
    return True


def check_versions(driver_versions: dict[str, str], worker_versions: dict[str, str], where: str) -> None:
    """Check that a worker has the packages of the driver.

    Raises:
        ConfigError: a version differs.
    """
    differing = [name for name in driver_versions if driver_versions[name] != worker_versions.get(name)]
    if differing:
        listed = ", ".join(
            f"{name} {worker_versions.get(name, 'none')} (the driver has {driver_versions[name]})" for name in differing
        )
        raise ConfigError(
            f"worker {where} has {listed}",
            why="the processes may misread each other's data",
            fix="install the same environment on every node, or name it in ray.runtime_env",
            where="ray.runtime_env",
            code="E-versions",
        )
