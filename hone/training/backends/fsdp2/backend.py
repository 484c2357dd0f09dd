"""Training backend of a model that is sharded over processes.

Data-parallel ranks get different rows of a mini-batch; the other ranks of a shard get the same rows. Totals, gradient norm
and statistics are those of the whole mini-batch on every rank, and so are decisions based on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification, PreTrainedTokenizerBase

from hone.config.model import ModelConfig
from hone.config.parallel import FsdpConfig, ParallelConfig
from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import Head
from hone.models.images import attach_processor, find_processor
from hone.models.kernels.cpu.memory import heap_watch
from hone.models.loading import (
    REWARD_SETTINGS,
    VALUE_SETTINGS,
    adapter_off,
    as_policy,
    as_reward_model,
    causal_lm,
    image_processor,
    load_empty,
    policy_factory,
    prepare,
    reward_factory,
    value_head,
    with_adapter,
)
from hone.models.padding import set_model_padding
from hone.models.streaming import WeightFiles, fill, materialise
from hone.training.backends.fsdp2.gradients import clip_gradients
from hone.training.backends.fsdp2.pipeline import Fsdp2PipelineLoop, StageComputation
from hone.training.backends.fsdp2.sharding import Sharded, shard_model
from hone.training.backends.fsdp2.tensor_parallel import add_partial_gradients
from hone.training.backends.protocol import ModelKind, Weights
from hone.training.checkpoints.model_state import ModelStager
from hone.training.engine import MicroBatchLoop, TrainSettings
from hone.training.export_stream import STREAMS
from hone.training.layout import Meshes
from hone.training.optimizer import ScheduledOptimizer
from hone.training.ranks import ProcessRanks
from hone.training.updates import GatheredRows, LossFn, Outputs, PartialLoss, Statistics, UpdateResult


def load_sharded(
    kind: ModelKind, config: ModelConfig, settings: TrainSettings, *, fsdp: FsdpConfig, meshes: Meshes, seed: int
) -> Sharded:
    """Create parameters without storage, shard them, and load the shards one tensor at a time. Collective. Raises
    ModelError: the model cannot be loaded or sharded with this layout.
    """
    model, files = _empty(kind, config, seed)
    sharded = shard_model(model, meshes, fsdp, settings.dtype, settings.compile_layers)
    materialise(sharded.computation, torch.device("cpu") if fsdp.offload_policy else settings.device)
    fill(causal_lm(model), files, fresh=("score.", "classifier.") if kind in ("value", "reward") else ())
    return sharded


def _empty(kind: ModelKind, config: ModelConfig, seed: int) -> tuple[nn.Module, WeightFiles]:
    if kind == "reward":
        factory = reward_factory(config)
        model, files = load_empty(factory, config, **REWARD_SETTINGS)
        ready = as_reward_model(model, factory, config, seed=seed, trainable=True)
        set_model_padding(ready, config)
        return ready, files
    if kind != "value":
        model, files = load_empty(policy_factory(config), config)
        attach_processor(model, image_processor(config))
        return as_policy(model, config, seed=seed, trainable=kind == "policy"), files
    model, files = load_empty(AutoModelForTokenClassification, config, **VALUE_SETTINGS)
    value_head(model)
    prepare(model, config)
    return model, files


class Fsdp2Backend:
    """This rank's shards of a model and its optimizer; see :class:`~hone.training.backends.protocol.TrainBackend`."""

    def __init__(self, sharded: Sharded, head: Head, settings: TrainSettings, *, fsdp: FsdpConfig) -> None:
        self.model, self.head, self.settings, self.fsdp = sharded.computation.model, head, settings, fsdp
        self._sharded, self._meshes = sharded, sharded.computation.meshes
        optim = settings.optim
        scaled = "float16" in (settings.dtype, fsdp.mixed_precision.param_dtype)
        stages = self._stages = sharded.stages
        names = None if stages is None else stages.trained
        self.optimizer = (
            ScheduledOptimizer(self.model, optim, settings.total_steps, scaled=scaled, names=names) if optim else None
        )
        self._loss_scale = self.optimizer and self.optimizer.loss_scale
        self._ranks = ProcessRanks(self._meshes.data_group, settings.device)
        cost = CostModel.from_config(causal_lm(self.model).config.to_dict())
        shared = {"ranks": self._ranks, "cost": cost, "loss_scale": self._loss_scale}
        if isinstance(sharded.computation, StageComputation):
            self._loop: MicroBatchLoop = Fsdp2PipelineLoop(sharded.computation, settings, **shared)
        else:
            self._loop = MicroBatchLoop(
                sharded.computation,
                settings,
                routers=sharded.computation.routers,
                reads_images=find_processor(causal_lm(self.model)) is not None,
                **shared,
            )
        self._stager = ModelStager(
            self.model,
            self.optimizer and self.optimizer.inner,
            self._loss_scale,
            self.optimizer and self.optimizer.average,
            stages=stages,
        )
        self._offload_parameters()

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
        if meshes is None:
            raise RuntimeError("fsdp2 needs the meshes of a layout")
        fsdp = parallel.fsdp_config
        sharded = load_sharded(kind, model, settings, fsdp=fsdp, meshes=meshes, seed=seed)
        return cls(sharded, head, settings, fsdp=fsdp)

    @property
    def data_parallel_size(self) -> int:
        return self._ranks.size

    def infer_batch(
        self, batch: Batch, *, with_entropy: bool = False, max_tokens: int | None = None, head: Head | None = None
    ) -> dict[str, Ragged]:
        with self._in_use():
            self.model.eval()
            columns = self._loop.infer(batch, head or self.head, with_entropy=with_entropy, max_tokens=max_tokens)
            self._sharded.root.reshard()  # without a backward pass the last gathered parameters would stay in memory
        return columns

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        step: int,
        with_entropy: bool = False,
        outputs_seen: Outputs | None = None,
    ) -> UpdateResult:
        with self._in_use():
            self.begin_update()
            self.model.train()
            statistics = self._loop.accumulate_gradients(
                batch, self.head, loss_fn, with_entropy=with_entropy, outputs_seen=outputs_seen
            )
            return self._apply(step, statistics)

    def begin_update(self) -> None:
        if self.optimizer is None:
            raise RuntimeError("this backend was built without an optimizer")
        self.optimizer.begin()

    def accumulate(
        self, batch: Batch, loss: PartialLoss, *, with_entropy: bool = False, outputs_seen: Outputs | None = None
    ) -> None:
        with self._in_use():
            self.model.train()
            self._loop.accumulate_part(batch, self.head, loss, with_entropy=with_entropy, outputs_seen=outputs_seen)

    def apply_gradients(self, step: int, loss: PartialLoss) -> UpdateResult:
        with self._in_use():
            return self._apply(step, loss.statistics, loss.scale)

    def gather_rows(self, local: Batch) -> GatheredRows:
        return self._ranks.gather_rows(local)

    def learning_rate(self, step: int) -> float:
        return self.optimizer.learning_rate(step) if self.optimizer else 0.0

    def take_busy_seconds(self) -> float:
        return self._loop.take_busy_seconds()

    def reference_mode(self, adapter: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        return adapter_off(self.model) if adapter is None else with_adapter(self.model, adapter)

    def shared_module(self) -> None:
        return

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        with self._in_use():
            if self._stages is not None:
                yield from self._stages.export(which, dtype=dtype)
            else:
                yield from STREAMS[which](self.model, dtype=dtype)

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        return self._stager.stage(location, name, tokenizer)

    def restore(self, location: str, name: str) -> None:
        self._stager.restore(location, name)
        if self.optimizer is not None and self.fsdp.optimizer_offload:
            self.optimizer.move_state(torch.device("cpu"))

    def _apply(self, step: int, statistics: list[Statistics], scale: float = 1.0) -> UpdateResult:
        optimizer = self.optimizer
        assert optimizer is not None
        with self._loop.computing():
            if self.fsdp.optimizer_offload:
                optimizer.move_state(self.settings.device)
            if self._meshes.layout.tensor > 1:
                add_partial_gradients(self._sharded.partial, self._meshes.tensor_group)
            stages = self._stages
            if stages is not None:
                stages.add_shared_gradient()
            optimizer.scale(scale)
            grad_norm = clip_gradients(
                optimizer.parameters,
                optimizer.config.clip_grad,
                self.settings.device,
                stages=self._meshes.layout.pipeline,
                shared=None if stages is None else stages.shared,
            )
            result = optimizer.update(step, grad_norm, self._ranks.gather_statistics(statistics))
            if self.fsdp.optimizer_offload:
                optimizer.move_state(torch.device("cpu"))
            if self.settings.device.type == "cpu":
                heap_watch()()
        return result

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        """Move offloaded parameters to the device for the time of the block."""
        if self.fsdp.param_offload:
            self._move_parameters(self.settings.device)
        try:
            yield
        finally:
            self._offload_parameters()

    def _offload_parameters(self) -> None:
        if self.fsdp.param_offload:
            self._move_parameters(torch.device("cpu"))

    def _move_parameters(self, device: torch.device) -> None:
        if not self.fsdp.offload_policy:  # with offload_policy FSDP keeps the shards on the host
            self.model.to(device)
