"""The block ``ray``: where the workers of ``trainer.runtime=ray`` run; and the keys of a role's own pool of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import number


@dataclass(kw_only=True)
class OwnPoolConfig:
    """A role's own devices, apart from those of the actor. Needs trainer.runtime=ray."""

    enable_resource_pool: bool = False
    """Run this role on devices of its own instead of sharing the actor's."""
    nnodes: int = number(1, low=1)
    """Nodes of its own pool."""
    n_gpus_per_node: int = number(1, low=1)
    """Workers on each of them, one a device; on CPU: processes."""


@dataclass
class RayConfig:
    """How workers are started on Ray."""

    address: str | None = None
    """Cluster to connect to: auto (the one that runs on this machine, or the one of the job) or HOST:PORT; null starts one for
    the length of the run."""
    num_cpus: int | None = number(None, low=1)
    """CPUs that a cluster started here counts with; null means one a worker, and at least the cores of this machine. They are
    only counted, not bound."""
    object_store_memory_gb: float | None = number(None, above=0)
    """Shared memory for batches and weights in a cluster started here; null leaves it to Ray (30 % of the memory)."""
    device_fraction: float = number(1.0, above=0, high=1)
    """Share of a device (a GPU, or without one a CPU) that a worker takes; 0.5 lets two workers share one."""
    start_timeout: float = number(300.0, above=0)
    """Seconds that placement and the start of all workers may take."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the workers, such as {working_dir: ., pip: [math-verify]}."""
    env_vars: dict[str, Any] = field(default_factory=dict)
    """Environment variables by role, for workers that hold it: {reward_model: {CUDA_MODULE_LOADING: LAZY}}; the role "all"
    stands for every worker."""
