"""The block ``ray``, for the workers of ``trainer.runtime=ray``, and the keys of a role's separate pool of devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hone.config.fields import number


@dataclass(kw_only=True)
class OwnPoolConfig:
    """A separate pool of devices for a role. Needs trainer.runtime=ray."""

    enable_resource_pool: bool = False
    """Run this role on separate devices instead of the actor's."""
    nnodes: int = number(1, low=1)
    """Nodes of the separate pool."""
    n_gpus_per_node: int = number(1, low=1)
    """Workers per node of the separate pool, one per device; on CPU: processes."""


@dataclass
class RayConfig:
    """The Ray cluster and the start of its workers."""

    address: str | None = None
    """Cluster to connect to: auto (the one of this machine or job) or HOST:PORT; null starts a cluster for the duration of the
    run."""
    num_cpus: int | None = number(None, low=1)
    """CPU count of a cluster started here; null means one per worker, and at least the cores of this machine. Workers are not
    bound to CPUs."""
    object_store_memory_gb: float | None = number(None, above=0)
    """Shared memory for batches and weights in a cluster started here; null leaves it to Ray (30 % of the memory)."""
    device_fraction: float = number(1.0, above=0, high=1)
    """Share of a device (a GPU, or a CPU without GPUs) per worker; with 0.5 two workers share one."""
    start_timeout: float = number(300.0, above=0)
    """Time limit of placement and start of all workers in seconds."""
    runtime_env: dict[str, Any] = field(default_factory=dict)
    """Ray's runtime environment of the workers, such as {working_dir: ., pip: [math-verify]}."""
    env_vars: dict[str, Any] = field(default_factory=dict)
    """Environment variables of workers, by role: {reward_model: {CUDA_MODULE_LOADING: LAZY}}; "all" means every worker."""
