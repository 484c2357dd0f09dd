"""Connect to a Ray cluster: a running one, or one that is started for the run."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import AuthenticationError, RaySystemError

from hone.config.run import RayConfig
from hone.errors import ConfigError

log = logging.getLogger("hone")

SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # by default Ray's workers have a lower priority than other processes
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a worker without a GPU keeps CUDA_VISIBLE_DEVICES
    "RAY_enable_worker_prestart": "0",  # such processes would be unused: Hone's workers have a separate environment
    "RAY_prestart_worker_first_driver": "0",
}
"""Environment variables for Ray; existing values are kept."""
PROBE_SECONDS = 5.0
"""Seconds that an address has to accept a connection."""


@dataclass(frozen=True)
class Connection:
    """Connection to a cluster.

    Attributes:
        mine: whether this process made the connection; one of the caller stays open.
        folder: logs and sockets of a cluster that was started for the run.
    """

    mine: bool
    folder: Path | None = None

    def close(self) -> None:
        """Disconnect; a cluster that was started for the run ends too, and its logs go unless an error is on its way."""
        if self.mine:
            ray.shutdown()
        if self.folder is not None and sys.exc_info()[0] is None:
            shutil.rmtree(self.folder, ignore_errors=True)


def connect(config: RayConfig, *, workers: int) -> Connection:
    """Connect to ``ray.address``, or start a cluster on this machine.

    Args:
        workers: number of processes that will be placed.

    Raises:
        ConfigError: the address does not answer, or refuses the connection.
    """
    if config.address is not None:
        _probe(config.address)
    if ray.is_initialized():
        return Connection(mine=False)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    shared = {"logging_level": logging.WARNING, "log_to_driver": True, "include_dashboard": None}
    if config.address is None:
        cpus = config.num_cpus or max(workers, len(os.sched_getaffinity(0)))
        store = config.object_store_memory_gb
        ray.init(
            **{**shared, "include_dashboard": False},
            address="local",
            num_cpus=cpus,
            object_store_memory=int(store * 2**30) if store else None,
        )
        context = ray.get_runtime_context()
        return Connection(mine=True, folder=Path(context.get_temp_dir()) / context.get_session_name())
    try:
        ray.init(**shared, address=config.address)
    except (ConnectionError, RaySystemError, RuntimeError) as error:
        raise _refused(config.address, error) from error
    return Connection(mine=True)


def capacity(resource: str) -> float:
    """Return the amount of a resource on all nodes together."""
    return sum(node["Resources"].get(resource, 0.0) for node in ray.nodes() if node["Alive"])


def _probe(address: str) -> None:
    """Try HOST:PORT first, because Ray waits for minutes."""
    host, _, port = address.rpartition(":")
    if "//" in address or not port.isdigit() or not host:
        return
    try:
        socket.create_connection((host, int(port)), PROBE_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, reason: str) -> ConfigError:
    return ConfigError(
        f"no Ray cluster answers at {address}: {reason}",
        why="the workers cannot start without a cluster",
        fix="run `ray start --head` there and set ray.address to the printed address; or ray.address=null to start a cluster here",
        where="ray.address",
        code="E-ray-address",
    )


def _refused(address: str, error: Exception) -> ConfigError:
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, AuthenticationError):
            return ConfigError(
                f"the Ray cluster at {address} requires a token",
                why="since Ray 2.53 a cluster authenticates connections if a token file exists",
                fix="export RAY_AUTH_MODE=token in this shell (the token file of the cluster must be on this machine too)",
                where="ray.address",
                code="E-ray-address",
            )
        chain = chain.__cause__ or chain.__context__
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if "ersion mismatch" in str(error):
        return ConfigError(
            f"the Ray cluster at {address} has different versions: {' '.join(str(error).split())}",
            why="the two cannot communicate",
            fix="install the same Python and Ray on both sides",
            where="ray.address",
            code="E-versions",
        )
    return _unreachable(address, text)
