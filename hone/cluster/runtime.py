"""The two runtimes behind one face: where the roles of a run live, and how they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import Answer
from hone.config.tree import RLConfig


class AnyBatch(Protocol):
    """A batch as the program sees it: a :class:`~hone.data.batch.Batch`, or with its columns elsewhere a
    :class:`~hone.cluster.remote_batch.RemoteBatch`. Both have these operations.
    """

    @property
    def uids(self) -> list[str]: ...
    def __len__(self) -> int: ...
    def __contains__(self, name: object) -> bool: ...
    def names(self) -> list[str]: ...
    def select(self, *names: str) -> AnyBatch: ...
    def rename(self, names: Mapping[str, str]) -> AnyBatch: ...
    def updated(self, other: Any) -> AnyBatch: ...
    def reorder(self, rows: Sequence[int]) -> AnyBatch: ...
    def slice(self, start: int, stop: int) -> AnyBatch: ...


class Group(Protocol):
    """All workers that play a role, called as one: ``group.log_probs(batch)`` asks each for its part and puts the answers
    together, as ``@dispatch`` on the method says. A call gives an :class:`~hone.cluster.dispatch.Answer`.
    """

    dp_size: int

    def __getattr__(self, method: str) -> Callable[..., Answer]: ...


class Runtime(Protocol):
    """The roles of a run."""

    def group(self, name: str) -> Group:
        """The workers of a role.

        Raises:
            KeyError: the run has no such role.
        """
        ...

    def __contains__(self, name: object) -> bool: ...

    def begin_step(self, seed: int) -> None:
        """Seed torch in every process, and let what was kept of the last step go."""
        ...

    def reads(self) -> set[str]:
        """The keys of the configuration that processes apart from this one have read."""
        ...

    def memory(self) -> dict[str, dict[str, float]]:
        """What every process with models has held so far, by ``pool[rank]``; see :class:`hone.training.memory.MemoryUse`."""
        ...

    def close(self) -> None:
        """End what was started."""
        ...


def build_runtime(config: RLConfig, roles: Sequence[RoleSpec], *, total_steps: int, resume: str | None) -> Runtime:
    """Start the runtime that ``trainer.runtime`` names, with all roles in place.

    Args:
        config: of the run.
        roles: in the order in which they are made.
        total_steps: horizon of the schedules.
        resume: location of the checkpoint to go on from, or None.

    Raises:
        HoneError: what the user can mend: no Ray, no cluster at that address, too few devices, a model that does not load.
    """
    if config.trainer.runtime == "ray":
        from hone.cluster.ray.runtime import RayRuntime

        return RayRuntime(config, roles, total_steps=total_steps, resume=resume)
    from hone.cluster.local import LocalRuntime

    return LocalRuntime(config, roles, total_steps=total_steps, resume=resume)
