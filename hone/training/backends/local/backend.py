"""Training backend of a model in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.compiled import compile_layers
from hone.models.experts import expert_routers
from hone.models.heads import Head
from hone.models.inputs import PackedSequences
from hone.models.kernels.cpu.memory import heap_watch
from hone.models.loading import (
    adapter_off,
    load_policy,
    load_reward_model,
    load_value_model,
    narrow_frozen_matrices,
    with_adapter,
)
from hone.models.padding import set_model_padding
from hone.training.backends.protocol import ModelKind, Weights
from hone.training.checkpoints.model_state import ModelStager
from hone.training.engine import MicroBatchLoop, TrainSettings
from hone.training.export_stream import STREAMS
from hone.training.layout import Meshes
from hone.training.microbatches import MicroBatchRecorder, MicroBatchTarget
from hone.training.optimizer import ScheduledOptimizer
from hone.training.ranks import SingleRank
from hone.training.updates import GatheredRows, LossFn, Outputs, PartialLoss, Statistics, UpdateResult


class LocalBackend:
    """A whole model and its optimizer; :class:`~hone.training.backends.protocol.TrainBackend` documents the methods.

    Args:
        model: a Hugging Face module (adapters included), on the settings' device. Its frozen matrices may become narrower.
    """

    data_parallel_size = 1

    def __init__(self, model: nn.Module, head: Head, settings: TrainSettings) -> None:
        self.model, self.head, self.settings = model, head, settings
        narrow_frozen_matrices(model, settings.device, settings.dtype)
        self._compiled = compile_layers(model, settings.device, settings.compile_layers)
        optim = settings.optim
        scaled = settings.dtype == "float16"
        self.optimizer = ScheduledOptimizer(model, optim, settings.total_steps, scaled=scaled) if optim else None
        self._loss_scale = self.optimizer and self.optimizer.loss_scale
        self._ranks = SingleRank()
        self._routers = expert_routers(model)
        self._loop = MicroBatchLoop(
            self._forward, settings, ranks=self._ranks, loss_scale=self._loss_scale, routers=self._routers
        )
        self._stager = ModelStager(
            model, self.optimizer and self.optimizer.inner, self._loss_scale, self.optimizer and self.optimizer.average
        )

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
        del parallel, meshes
        if kind == "value":
            return cls(load_value_model(model, device=settings.device), head, settings)
        if kind == "reward":
            scalar = load_reward_model(model, device=settings.device, seed=seed)
            set_model_padding(scalar, model)
            return cls(scalar, head, settings)
        return cls(load_policy(model, device=settings.device, seed=seed, trainable=kind == "policy"), head, settings)

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
        self.begin_update()
        self.model.train()
        statistics = self._loop.accumulate_gradients(
            batch, self.head, loss_fn, with_entropy=with_entropy, outputs_seen=outputs_seen
        )
        return self._apply(step, statistics)

    def begin_update(self) -> None:
        self._optimizer.begin()

    def accumulate(
        self, batch: Batch, loss: PartialLoss, *, with_entropy: bool = False, outputs_seen: Outputs | None = None
    ) -> None:
        self.model.train()
        self._loop.accumulate_part(batch, self.head, loss, with_entropy=with_entropy, outputs_seen=outputs_seen)

    def apply_gradients(self, step: int, loss: PartialLoss) -> UpdateResult:
        return self._apply(step, loss.statistics, loss.scale)

    def save_next_micro_batch(self, target: MicroBatchTarget) -> None:
        self._loop.recorder = MicroBatchRecorder(self.model, self.settings.dtype, target)

    def gather_rows(self, local: Batch) -> GatheredRows:
        return self._ranks.gather_rows(local)

    def learning_rate(self, step: int) -> float:
        return self.optimizer.learning_rate(step) if self.optimizer else 0.0

    def take_busy_seconds(self) -> float:
        return self._loop.take_busy_seconds()

    def reference_mode(self, adapter: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        return adapter_off(self.model) if adapter is None else with_adapter(self.model, adapter)

    def shared_module(self) -> nn.Module:
        return self.model

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        yield from STREAMS[which](self.model, dtype=dtype)

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        return self._stager.stage(location, name, tokenizer)

    def restore(self, location: str, name: str) -> None:
        self._stager.restore(location, name)

    @property
    def _optimizer(self) -> ScheduledOptimizer:
        if self.optimizer is None:
            raise RuntimeError("this backend was built without an optimizer")
        return self.optimizer

    def _forward(self, head: Head, packed: PackedSequences, with_entropy: bool) -> dict[str, Tensor]:
        if self._compiled is not None:
            packed = self._compiled.traceable(packed)
        if self._routers is not None:
            self._routers.follow(packed.experts)
        return head(self.model, packed, with_entropy=with_entropy)

    def _apply(self, step: int, statistics: list[Statistics], scale: float = 1.0) -> UpdateResult:
        optimizer = self._optimizer
        with self._loop.computing():
            optimizer.scale(scale)
            grad_norm = float(nn.utils.clip_grad_norm_(optimizer.parameters, optimizer.config.clip_grad))
            result = optimizer.update(step, grad_norm, statistics)
            if self.settings.device.type == "cpu":
                heap_watch()()
        return result
