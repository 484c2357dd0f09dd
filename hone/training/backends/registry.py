"""Training backends by name; cheap to import, for checks before a run."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hone.config.parallel import ParallelConfig
from hone.errors import ConfigError
from hone.registry import Registry, imported

if TYPE_CHECKING:
    from hone.training.backends.protocol import TrainBackend

KEY = "actor_rollout_ref.actor.strategy"
_PLANNED = ("torchtitan",)


@dataclass(frozen=True)
class BackendEntry:
    """A registered backend.

    Attributes:
        path: ``module:Class``, imported at the first use.
        fewest_processes: with fewer processes ``local`` is used instead.
        most_processes: maximum of processes that share a model; None for any number.
        pipelines: whether it divides layers into pipeline stages.
        package: optional package that it imports, as the name of a distribution; its module is ``module``.
        module: top-level module of ``package``.
        extra: extra of Hone that installs ``package``.
    """

    path: str
    fewest_processes: int = 1
    most_processes: int | None = None
    pipelines: bool = False
    package: str = ""
    module: str = ""
    extra: str = ""

    def load(self) -> type[TrainBackend]:
        """Import the class.

        Raises:
            ConfigError: the path has no such class, or the package is not installed.
        """
        self.require_package()
        return imported(self.path, KEY)

    def require_package(self, key: str = KEY) -> None:
        """Check that the optional package is installed.

        Raises:
            ConfigError: it is not.
        """
        if self.package and find_spec(self.module) is None:
            raise ConfigError(
                f"{key} names a training backend that needs the package {self.package}, which is not installed",
                where=key,
                fix=f"pip install 'hone-rl[{self.extra}]', or {key}=fsdp2",
            )


def _entry(backend: Any, path: str) -> BackendEntry:
    """Return the entry of a class given by its import path."""
    if not hasattr(backend, "build") or not hasattr(backend, "train_batch"):
        raise TypeError("a backend is a class with the methods of hone.training.backends.protocol.TrainBackend")
    return BackendEntry(path)


BACKENDS: Registry[BackendEntry] = Registry("training backend", key=KEY, adopt=_entry)
"""Training backends by their ``actor.strategy``."""


def backend_of(config: ParallelConfig, processes: int) -> BackendEntry:
    """Return the backend for a model on this number of processes; null means ``local`` for one and ``fsdp2`` for more.

    Raises:
        ConfigError: the backend is unknown, or does not support this number of processes.
    """
    key = config.key("strategy")
    name = config.strategy or ("local" if processes == 1 else "fsdp2")
    if name in _PLANNED and name not in BACKENDS:
        raise ConfigError(
            f"strategy '{name}' is not supported yet",
            why="Hone shards models with PyTorch: FSDP2, tensor, sequence and expert parallelism",
            where=key,
            fix=f"{key}=fsdp2",
        )
    entry = BACKENDS.get(name, key=key)
    if entry.most_processes is not None and processes > entry.most_processes:
        raise ConfigError(
            f"strategy '{name}' supports at most {entry.most_processes} process per model, but there are {processes}",
            why="their gradients would not be summed",
            where=key,
            fix=f"{key}=fsdp2, or trainer.nnodes=1 trainer.n_gpus_per_node=1",
        )
    stages, stages_key = config.pipeline_model_parallel_size, config.key("pipeline_model_parallel_size")
    if stages > 1 and not entry.pipelines:
        raise ConfigError(
            f"strategy '{name}' has no pipeline parallelism, but {stages_key}={stages}",
            why="every process would compute all layers",
            where=stages_key,
            fix=f"{key}=fsdp2, or {stages_key}=1",
        )
    return BACKENDS.get("local") if processes < entry.fewest_processes else entry
