"""The ranks of a launcher, by its environment variables; cheap to import, for checks before a run."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hone.config.trees import AnyConfig
from hone.errors import ConfigError

POOL = "main"
"""Name of the only pool of ranks."""
PRECEDENCE = 10.0
"""Seconds that the first rank has to say what is wrong; the launcher then ends the others."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class LaunchedRank:
    """This process among those that the launcher started.

    Attributes:
        rank: number of the process.
        world: number of processes.
        local_rank: number among the processes of this machine; that of its GPU.
        local_world: processes of this machine.
        address: name of the machine of rank 0.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> LaunchedRank:
        """Read the variables of the launcher.

        Raises:
            ConfigError: a variable is missing or not a number.
        """
        environment = os.environ if environment is None else environment
        missing = [name for name in _VARIABLES if name not in environment]
        if missing:
            raise ConfigError(
                f"trainer.runtime=torchrun, but the environment has no {', '.join(missing)}",
                why="a launcher starts every rank with these variables; this process is alone",
                fix="torchrun --nproc-per-node N -m hone.cli.main ..., or trainer.runtime=ray, which starts its workers itself",
                where="trainer.runtime",
                code="R02",
            )
        rank, world, local_rank, local_world = (_number(environment, name) for name in _VARIABLES[:4])
        return cls(rank, world, local_rank, local_world, environment["MASTER_ADDR"])


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdigit():
        raise ConfigError(
            f"{name}={environment[name]} is not a number",
            why="the ranks find each other by it",
            fix="start the command with torchrun, which sets it",
            where="environment",
            code="R02",
        )
    return int(environment[name])


def follows(config: AnyConfig) -> bool:
    """Return whether this process is a launched rank other than the first, which alone speaks to the user.

    Raises:
        ConfigError: trainer.runtime=torchrun, but no launcher started this process.
    """
    return config.trainer.runtime == "torchrun" and LaunchedRank.from_environment().rank > 0


@functools.cache
def let_first_speak() -> None:
    """Wait on a rank other than the first, whose message a launcher would cut off if this rank ended before."""
    if all(name in os.environ for name in _VARIABLES) and os.environ["RANK"] != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(PRECEDENCE)


def check_launched(config: AnyConfig) -> LaunchedRank:
    """Return this rank, and check that the launcher started as many as configured.

    Raises:
        ConfigError: it did not.
    """
    launched, trainer = LaunchedRank.from_environment(), config.trainer
    if (trainer.nnodes * trainer.n_gpus_per_node, trainer.n_gpus_per_node) != (launched.world, launched.local_world):
        nodes = launched.world // launched.local_world
        raise ConfigError(
            f"the launcher started {launched.world} ranks, {launched.local_world} on this machine, but trainer.nnodes="
            f"{trainer.nnodes} x trainer.n_gpus_per_node={trainer.n_gpus_per_node}",
            why="layouts, batch sizes and the memory plan are checked for the configured number",
            fix=f"trainer.nnodes={nodes} trainer.n_gpus_per_node={launched.local_world}",
            where="trainer.n_gpus_per_node",
            code="R02",
        )
    return launched
