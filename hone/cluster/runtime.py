"""Common interface of the runtimes, which hold the roles of a run and call them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hone.cluster.any_batch import AnyBatch
from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer
from hone.config.trees import AnyConfig
from hone.data.batch import Batch


class Group(Protocol):
    """All workers of a role, called as one.

    ``group.log_probs(batch)`` calls each worker and combines the results, as ``@dispatch`` on the method says. A call
    returns an :class:`~hone.cluster.dispatch.Answer`.
    """

    dp_size: int

    def __getattr__(self, method: str) -> Callable[..., Answer]: ...


class Runtime(Protocol):
    """Roles of a run."""

    def group(self, name: str) -> Group:
        """Return the workers of a role.

        Raises:
            KeyError: the run has no such role.
        """
        ...

    def __contains__(self, name: object) -> bool: ...

    def put(self, batch: Batch) -> AnyBatch:
        """Return a batch of the program in the form that groups take; it has a column ``uid``."""
        ...

    def fetch(self, batch: AnyBatch) -> Batch:
        """Return a batch with its columns in this process."""
        ...

    def begin_step(self, seed: int) -> None:
        """Seed torch in every process, and release cached data of the last step."""
        ...

    def memory(self) -> dict[str, dict[str, float]]:
        """Return the memory of every process with models, by ``pool[rank]``; see :class:`hone.models.kernels.cpu.memory.MemoryUse`."""
        ...

    def close(self) -> None:
        """End all processes that were started."""
        ...


def build_runtime(config: AnyConfig, roles: Sequence[RoleSpec], *, total_steps: int, resume: str | None) -> Runtime:
    """Start the runtime of ``trainer.runtime``, with all roles built.

    Args:
        config: configuration of the run.
        roles: roles in the order of their construction.
        total_steps: horizon of the schedules.
        resume: location of the checkpoint to resume from, or None.

    Raises:
        HoneError: mistakes that the user can fix: no Ray, no cluster at that address, too few devices, a model that does not load.
    """
    if config.trainer.runtime == "ray":
        from hone.cluster.ray.runtime import RayRuntime

        return RayRuntime(config, roles, total_steps=total_steps, resume=resume)
    if config.trainer.runtime == "torchrun":
        from hone.cluster.torchrun.runtime import TorchrunRuntime

        return TorchrunRuntime(config, roles, total_steps=total_steps, resume=resume)
    from hone.cluster.local import LocalRuntime

    return LocalRuntime(config, roles, total_steps=total_steps, resume=resume)
