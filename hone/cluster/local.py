"""Local runtime: all roles of a run in the calling process, on one device. A call on a group is a plain call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import torch

from hone.cluster.context import RoleSpec, WorkerContext, prepare_torch
from hone.cluster.dispatch import Answer, Split, dispatch_of
from hone.config.derived import check_local
from hone.config.tree import RLConfig
from hone.models.kernels.cpu.memory import MemoryUse


class LocalAnswer(Answer):
    """Result of a role in this process: available, or to be awaited."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __await__(self) -> Any:
        return self._wait().__await__()

    def result(self) -> Any:
        """Return the result of a method that is not async."""
        if inspect.isawaitable(self._value):
            raise TypeError("an async method of a local role must be awaited")
        return self._value

    async def _wait(self) -> Any:
        return await self._value if isinstance(self._value, Coroutine) else self._value


class LocalGroup:
    """The only worker of a role, in this process.

    Attributes:
        role: worker.
        dp_size: 1.
    """

    dp_size = 1

    def __init__(self, role: Any) -> None:
        self.role = role

    def __getattr__(self, method: str) -> Callable[..., LocalAnswer]:
        split = dispatch_of(type(self.role), method).split
        bound_method = getattr(self.role, method)

        def call(*args: Any, **kwargs: Any) -> LocalAnswer:
            if split is Split.RANKS:
                (args,), kwargs = zip(*args, strict=True), {name: value[0] for name, value in kwargs.items()}
            return LocalAnswer(bound_method(*args, **kwargs))

        return call


class LocalRuntime:
    """Build the roles of a run one after the other in the calling process.

    Args:
        config: configuration of the run.
        roles: roles to build.
        total_steps: horizon of the schedules.
        resume: location of the checkpoint to resume from, or None.

    Raises:
        ConfigError: the configuration needs more than one process.
    """

    def __init__(
        self, config: RLConfig, roles: Sequence[RoleSpec], *, total_steps: int = 1, resume: str | None = None
    ) -> None:
        check_local(config)
        device = prepare_torch(config.trainer)
        self._memory = MemoryUse()
        self.context = WorkerContext(config, device, total_steps=total_steps, resume=resume)
        for role in roles:
            self.add(role)

    def add(self, role: RoleSpec) -> LocalGroup:
        """Build another role."""
        self.context.roles[role.name] = role.cls(self.context, **role.arguments)
        return self.group(role.name)

    def group(self, name: str) -> LocalGroup:
        """Return the worker of a role."""
        return LocalGroup(self.context.roles[name])

    def __contains__(self, name: object) -> bool:
        return name in self.context.roles

    def begin_step(self, seed: int) -> None:
        """Seed torch."""
        torch.manual_seed(seed)

    def memory(self) -> dict[str, dict[str, float]]:
        """Return the memory of this process."""
        return {"main[0]": self._memory()}

    def close(self) -> None:
        """Close the roles."""
        for role in reversed(list(self.context.roles.values())):
            if hasattr(role, "close"):
                role.close()
        self.context.roles.clear()
