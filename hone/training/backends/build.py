"""Construction of a training backend from a model directory."""

from __future__ import annotations

import dataclasses

from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.errors import ConfigError
from hone.models.heads import Head
from hone.training.backends.protocol import ModelKind, TrainBackend
from hone.training.backends.registry import backend_of
from hone.training.engine import TrainSettings
from hone.training.layout import Meshes


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
