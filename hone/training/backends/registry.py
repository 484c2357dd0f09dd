"""Training backends by name, and their construction; cheap to import, for checks before a run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hone.config.parallel import ParallelConfig
from hone.errors import ConfigError
from hone.extras import install_command
from hone.registry import Registry, imported

if TYPE_CHECKING:
    from hone.config.model import ModelConfig
    from hone.models.heads import Head
    from hone.training.backends.protocol import ModelKind, TrainBackend
    from hone.training.engine import TrainSettings
    from hone.training.layout import Meshes

KEY = "actor_rollout_ref.actor.strategy"
_PLANNED = ("torchtitan",)


@dataclass(frozen=True)
class BackendEntry:
    """A registered backend."""

    path: str  # ``module:Class``, imported at the first use
    fewest_processes: int = 1  # with fewer, ``local`` is used instead
    most_processes: int | None = None  # that share a model; None for any number
    pipelines: bool = False  # divides layers into pipeline stages
    package: str = ""  # optional distribution that it imports
    module: str = ""  # top-level module of ``package``
    extra: str = ""  # of Hone that installs ``package``

    def load(self) -> type[TrainBackend]:
        """Import the class. Raises ConfigError: the path has no such class, or the package is not installed."""
        self.require_package()
        return imported(self.path, KEY)

    def require_package(self, key: str = KEY) -> None:
        """Raise ConfigError if the optional package is not installed."""
        if self.package and find_spec(self.module) is None:
            raise ConfigError(
                f"{key} names a training backend that needs the package {self.package}, which is not installed",
                where=key,
                fix=f"{install_command(self.extra)}, or {key}=fsdp2",
            )


def _entry(backend: Any, path: str) -> BackendEntry:
    if not hasattr(backend, "build") or not hasattr(backend, "train_batch"):
        raise TypeError("a backend is a class with the methods of hone.training.backends.protocol.TrainBackend")
    return BackendEntry(path)


BACKENDS: Registry[BackendEntry] = Registry("training backend", key=KEY, adopt=_entry)
"""Training backends by their ``actor.strategy``."""


def backend_of(config: ParallelConfig, processes: int) -> BackendEntry:
    """Return the backend for a model on this number of processes; null means ``local`` for one and ``fsdp2`` for more.

    Raises ConfigError: the backend is unknown, or does not support this number of processes.
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


def build_train_backend(
    kind: ModelKind,
    model: ModelConfig,
    head: Head,
    settings: TrainSettings,
    *,
    parallel: ParallelConfig,
    meshes: Meshes | None,
    seed: int,
) -> TrainBackend:
    """Build the backend of ``parallel.strategy``; for the arguments see :meth:`TrainBackend.build`. Collective.

    Raises:
        ConfigError: the backend is unknown, or does not divide rows according to the layout.
        ModelError: the model cannot be loaded or sharded with this layout.
    """
    processes, ranks = (1, 1) if meshes is None else (meshes.layout.world, meshes.layout.dp_size)
    settings = dataclasses.replace(
        settings, offload_activations=model.enable_activation_offload, compile_layers=model.compile_layers
    )
    cls = backend_of(parallel, processes).load()
    backend = cls.build(kind, model, head, settings, parallel=parallel, meshes=meshes, seed=seed)
    if backend.data_parallel_size != ranks:
        raise ConfigError(
            f"the layout has {ranks} data-parallel ranks, but {cls.__name__} has {backend.data_parallel_size}",
            why="rows would be counted twice or not at all",
            where=parallel.key("strategy"),
            fix="parallel sizes that the backend supports, or another strategy",
        )
    return backend
