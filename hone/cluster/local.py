"""Local runtime: all roles of a run in the calling process, on one device. A call on a group is a plain call.

In asynchronous training the models compute in a thread of their own, so that episodes, tools and rewards progress meanwhile.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from hone.cluster.context import RoleSpec, WorkerContext, prepare_torch
from hone.cluster.dispatch import Answer, Dispatch, Split, offer_methods
from hone.cluster.handles import AnyBatch
from hone.config.derived import RunSpec
from hone.config.pools import check_local, divided_cores
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.data.batch import Batch
from hone.models.kernels.cpu.memory import MemoryUse

COMPUTING = ("actor", "reference", "critic", "reward_model", "teacher")
"""Roles whose models compute in this process."""


class LocalAnswer(Answer[Any]):
    """Result of a role in this process: available, or to be awaited."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        return self._wait().__await__()

    def result(self) -> Any:
        """Return the result of a method that is not async."""
        if isinstance(self._value, Future):
            return self._value.result()
        if inspect.isawaitable(self._value):
            raise TypeError("an async method of a local role must be awaited")
        return self._value

    async def _wait(self) -> Any:
        if isinstance(self._value, Future):
            return await asyncio.wrap_future(self._value)
        return await self._value if isinstance(self._value, Coroutine) else self._value


class LocalGroup:
    """The only worker of a role, in this process.

    Args:
        compute: thread that runs methods which are not async; None runs them in the calling thread.
    """

    dp_size = 1

    def __init__(self, role: Any, compute: ThreadPoolExecutor | None = None) -> None:
        self.role, self._compute = role, compute
        offer_methods(self, type(role), self._call)

    def _call(self, spec: Dispatch, name: str, *args: Any, **kwargs: Any) -> LocalAnswer:
        method = getattr(self.role, name)
        if spec.split is Split.RANKS:
            args, kwargs = tuple(value[0] for value in args), {name: value[0] for name, value in kwargs.items()}
        elif spec.split is Split.ONE:
            args = args[1:]
        if self._compute is None or inspect.iscoroutinefunction(method):
            return LocalAnswer(method(*args, **kwargs))
        return LocalAnswer(in_thread(self._compute, method, *args, **kwargs))


class LocalRuntime:
    """Build the roles of a run one after the other in the calling process.

    Args:
        resume: location of the checkpoint to resume from, or None.

    Raises:
        ConfigError: the configuration needs more than one process.
    """

    def __init__(
        self, config: AnyConfig, roles: Sequence[RoleSpec], *, total_steps: int = 1, resume: str | None = None
    ) -> None:
        check_local(config)
        self._compute: ThreadPoolExecutor | None = None
        threads: int | None = None
        if isinstance(config, RLConfig) and RunSpec(config).asynchronous:
            torch.set_num_threads(1)  # the loop's thread computes only small things
            self._compute = ThreadPoolExecutor(1, thread_name_prefix="compute")
            threads = divided_cores(config)[1]
        device = self._here(functools.partial(prepare_torch, config.trainer, threads=threads))
        self._memory = MemoryUse()
        self.context = WorkerContext(config, device, total_steps=total_steps, resume=resume)
        for role in roles:
            self.add(role)

    def add(self, role: RoleSpec) -> LocalGroup:
        """Build another role."""
        build = functools.partial(role.cls, self.context, **role.arguments)
        self.context.roles[role.name] = self._here(build) if role.name in COMPUTING else build()
        return self.group(role.name)

    def group(self, name: str) -> Any:
        """Return the worker of a role."""
        return LocalGroup(self.context.roles[name], self._compute if name in COMPUTING else None)

    def _here(self, do: Callable[[], Any]) -> Any:
        """Call ``do`` in the thread that computes."""
        return do() if self._compute is None else in_thread(self._compute, do).result()

    def __contains__(self, name: object) -> bool:
        return name in self.context.roles

    def put(self, batch: Batch) -> Batch:
        """Return the same batch."""
        return batch

    def fetch(self, batch: AnyBatch) -> Batch:
        """Return the same batch."""
        assert isinstance(batch, Batch)
        return batch

    def begin_step(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def memory(self) -> dict[str, dict[str, float]]:
        """Return the memory of this process."""
        return {"main[0]": self._memory()}

    def close(self) -> None:
        """Close the roles."""
        self.context.close_roles()
        if self._compute is not None:
            self._compute.shutdown(wait=False, cancel_futures=True)


def in_thread(compute: ThreadPoolExecutor, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
    """Call ``do`` in a thread, in the context of the caller."""
    return compute.submit(contextvars.copy_context().run, functools.partial(do, *args, **kwargs))
