"""A training backend of one file: whole copies of a model whose gradients are summed by hand. It passes the suite like any other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Self

import pytest
import torch
import torch.distributed as dist
from support.train_backend_suite import TrainBackendConformance, Ways
from torch import Tensor, nn

from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import ConfigError
from hone.models.heads import Head, PolicyHead
from hone.models.loading import adapter_off, load_policy, load_value_model
from hone.training.backends import BACKENDS, BackendEntry
from hone.training.backends.protocol import ModelKind, TrainBackend, Weights
from hone.training.backends.registry import backend_of, build_train_backend
from hone.training.checkpoints.model_state import ModelStager
from hone.training.engine import MicroBatchLoop, Outputs, TrainSettings
from hone.training.export_stream import STREAMS
from hone.training.layout import Meshes
from hone.training.objectives import GatheredRows, LossFn, UpdateResult
from hone.training.optimizer import ScheduledOptimizer
from hone.training.ranks import ProcessRanks, RankGroup, SingleRank

pytestmark = pytest.mark.application("hone/training", "hone/cluster")


class ReplicaBackend:
    """Data parallelism without sharding: every rank has the whole model and the whole optimizer."""

    def __init__(self, model: nn.Module, head: Head, settings: TrainSettings, ranks: RankGroup) -> None:
        self.model, self.head = model, head
        self.optimizer = (
            ScheduledOptimizer(model, settings.optim, settings.total_steps) if settings.optim is not None else None
        )
        self._ranks = ranks
        self._loop = MicroBatchLoop(self._forward, settings, ranks=ranks)
        average = self.optimizer and self.optimizer.average
        self._stager = ModelStager(model, self.optimizer and self.optimizer.inner, average=average)

    @classmethod
    def build(
        cls,
        kind: ModelKind,
        model: ModelConfig,
        head: Head,
        settings: TrainSettings,
        *,
        parallel: ParallelConfig,
        meshes: Meshes | None,
        seed: int,
    ) -> Self:
        del parallel
        if kind == "value":
            module = load_value_model(model, device=settings.device)
        else:
            module = load_policy(model, device=settings.device, seed=seed, trainable=kind == "policy")
        group = None if meshes is None else dist.group.WORLD
        return cls(module, head, settings, SingleRank() if group is None else ProcessRanks(group, settings.device))

    @property
    def data_parallel_size(self) -> int:
        return self._ranks.size

    def infer_batch(
        self, batch: Batch, *, with_entropy: bool = False, max_tokens: int | None = None, head: Head | None = None
    ) -> dict[str, Ragged]:
        self.model.eval()
        return self._loop.infer(batch, head or self.head, with_entropy=with_entropy, max_tokens=max_tokens)

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        step: int,
        with_entropy: bool = False,
        outputs_seen: Outputs | None = None,
    ) -> UpdateResult:
        if self.optimizer is None:
            raise RuntimeError("a frozen model is not trained")
        self.model.train()
        self.optimizer.begin()
        local = self._loop.accumulate_gradients(
            batch, self.head, loss_fn, with_entropy=with_entropy, outputs_seen=outputs_seen
        )
        with self._loop.computing():
            if self._ranks.size > 1:
                for parameter in self.optimizer.parameters:
                    dist.all_reduce(parameter.grad)  # losses are shares of the mini-batch's, so gradients add up
            grad_norm = float(nn.utils.clip_grad_norm_(self.optimizer.parameters, self.optimizer.config.clip_grad))
            applied = self.optimizer.step(step, grad_norm)
        return UpdateResult(grad_norm, self._ranks.gather_statistics(local), applied)

    def gather_rows(self, local: Batch) -> GatheredRows:
        return self._ranks.gather_rows(local)

    def learning_rate(self, step: int) -> float:
        return self.optimizer.learning_rate(step) if self.optimizer else 0.0

    def take_busy_seconds(self) -> float:
        return self._loop.take_busy_seconds()

    def reference_mode(self) -> AbstractContextManager[None]:
        return adapter_off(self.model)

    def shared_module(self) -> nn.Module:
        return self.model

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        yield from STREAMS[which](self.model, dtype=dtype)

    def stage(self, location: str, name: str, tokenizer: Any = None) -> Callable[[], None]:
        return self._stager.stage(location, name, tokenizer)

    def restore(self, location: str, name: str) -> None:
        self._stager.restore(location, name)

    def _forward(self, head: Head, packed: Any, with_entropy: bool) -> dict[str, Tensor]:
        return head(self.model, packed, with_entropy=with_entropy)


PATH = "integration.test_replica_backend:ReplicaBackend"


class TestReplicas(TrainBackendConformance):
    strategy = PATH
    layouts = {"one process": Ways(), "two copies": Ways(2), "four copies": Ways(4)}


@contextlib.contextmanager
def registered(name: str) -> Iterator[None]:
    """Within the block the backend has a name, as by a line in ``hone/training/backends/__init__.py``."""
    BACKENDS.register(name)(BackendEntry(PATH, most_processes=4))
    try:
        yield
    finally:
        del BACKENDS._entries[name]


def test_a_registered_backend_is_built_by_its_name(tiny_models) -> None:
    def build(parallel: ParallelConfig) -> TrainBackend:
        settings = TrainSettings(torch.device("cpu"))
        model = ModelConfig(path=str(tiny_models["tied"]))
        return build_train_backend("frozen", model, PolicyHead(), settings, parallel=parallel, meshes=None, seed=0)

    with registered("replicas"):
        assert type(build(ParallelConfig(strategy="replicas"))).__name__ == "ReplicaBackend"
        with pytest.raises(ConfigError) as refused:
            backend_of(ParallelConfig(strategy="replicas"), 8)
        assert refused.value.where == "strategy"  # a block at the root of a tree
        with pytest.raises(ConfigError) as unknown:
            build(ParallelConfig(strategy="replica"))
        assert "replicas" in str(unknown.value)
