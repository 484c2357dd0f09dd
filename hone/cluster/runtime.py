"""Common interface of the runtimes, which hold the roles of a run and call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from hone.cluster.context import RoleSpec
from hone.cluster.handles import Actor, AnyBatch, Critic, Reference, RewardModel, Rollout, Teacher, Work
from hone.config.trees import AnyConfig
from hone.data.batch import Batch


class Runtime(Protocol):
    """Roles of a run."""

    def group(self, name: str) -> Any:
        """Return the handle of a role, whose methods call its workers and combine the results, as ``@dispatch`` on each says.

        :class:`Roles` has the handles of a run with their types.

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


class Roles:
    """The roles of an RL run; None stands for one that its algorithm does not need."""

    def __init__(self, runtime: Runtime) -> None:
        def optional(name: str) -> Any:
            return runtime.group(name) if name in runtime else None

        self.actor: Actor = runtime.group("actor")
        self.rollout: Rollout = runtime.group("rollout")
        self.work: Work = runtime.group("work")
        self.reference: Reference | None = optional("reference")
        self.critic: Critic | None = optional("critic")
        self.teacher: Teacher | None = optional("teacher")
        self.reward_model: RewardModel | None = optional("reward_model")


def build_runtime(config: AnyConfig, roles: Sequence[RoleSpec], *, total_steps: int, resume: str | None) -> Runtime:
    """Start the runtime of ``trainer.runtime``, with all roles built.

    Args:
        roles: roles in the order of their construction.
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
