"""Training backend of a model that is sharded over processes.

Data-parallel ranks get different rows of a mini-batch; the other ranks of a shard get the same rows. Totals, gradient norm
and statistics are those of the whole mini-batch on every rank, and so are decisions based on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor, nn
from transformers import AutoModelForTokenClassification

from hone.config.model import ModelConfig
from hone.config.parallel import FsdpConfig, ParallelConfig
from hone.data.balance import CostModel
from hone.models.heads import Head
from hone.models.images import attach_processor, find_processor
from hone.models.loading import (
    REWARD_SETTINGS,
    VALUE_SETTINGS,
    as_policy,
    as_reward_model,
    causal_lm,
    image_processor,
    load_empty,
    policy_factory,
    prepare,
    reward_factory,
    value_head,
)
from hone.models.padding import set_model_padding
from hone.models.streaming import WeightFiles, fill, materialise
from hone.training.backends.fsdp2.gradients import clip_gradients
from hone.training.backends.fsdp2.pipeline import Fsdp2PipelineLoop, StageComputation
from hone.training.backends.fsdp2.sharding import Sharded, shard_model
from hone.training.backends.fsdp2.tensor_parallel import add_partial_gradients
from hone.training.backends.protocol import ModelKind, Weights
from hone.training.engine import LoopBackend, MicroBatchLoop, TrainSettings, model_stager
from hone.training.layout import Meshes
from hone.training.optimizer import ScheduledOptimizer
from hone.training.ranks import ProcessRanks


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


class Fsdp2Backend(LoopBackend[ScheduledOptimizer]):
    """This rank's shards of a model and its optimizer; see :class:`~hone.training.backends.protocol.TrainBackend`."""

    def __init__(self, sharded: Sharded, head: Head, settings: TrainSettings, *, fsdp: FsdpConfig) -> None:
        model, meshes, stages = sharded.computation.model, sharded.computation.meshes, sharded.stages
        optim = settings.optim
        scaled = "float16" in (settings.dtype, fsdp.mixed_precision.param_dtype)
        names = None if stages is None else stages.trained
        optimizer = (
            ScheduledOptimizer(model, optim, settings.total_steps, scaled=scaled, names=names) if optim else None
        )
        super().__init__(model, head, settings, ProcessRanks(meshes.data_group, settings.device), optimizer)
        self.fsdp, self._sharded, self._meshes, self._stages = fsdp, sharded, meshes, stages
        cost = CostModel.from_config(causal_lm(model).config.to_dict())
        shared = {"ranks": self._ranks, "cost": cost, "loss_scale": optimizer and optimizer.loss_scale}
        if isinstance(sharded.computation, StageComputation):
            self._loop = Fsdp2PipelineLoop(sharded.computation, settings, **shared)
        else:
            self._loop = MicroBatchLoop(
                sharded.computation,
                settings,
                routers=sharded.computation.routers,
                reads_images=find_processor(causal_lm(model)) is not None,
                **shared,
            )
        self._stager = model_stager(model, optimizer, stages)
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

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if self._stages is None:
            yield from super().export_weights(which, dtype=dtype)
            return
        with self._in_use():
            yield from self._stages.export(which, dtype=dtype)

    def restore(self, location: str, name: str) -> None:
        super().restore(location, name)
        if self.optimizer is not None and self.fsdp.optimizer_offload:
            self.optimizer.move_state(torch.device("cpu"))

    def _gradient_norm(self, optimizer: ScheduledOptimizer, scale: float) -> float:
        if self._meshes.layout.tensor > 1:
            add_partial_gradients(self._sharded.partial, self._meshes.tensor_group)
        stages = self._stages
        if stages is not None:
            stages.add_shared_gradient()
        optimizer.scale(scale)
        return clip_gradients(
            optimizer.parameters,
            optimizer.config.clip_grad,
            self.settings.device,
            stages=self._meshes.layout.pipeline,
            shared=None if stages is None else stages.shared,
        )

    @contextlib.contextmanager
    def _passes(self, *, train: bool) -> Iterator[None]:
        with super()._passes(train=train):
            yield
        if not train:
            self._sharded.root.reshard()  # without a backward pass the last gathered parameters would stay in memory

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        optimizer = self.optimizer if self.fsdp.optimizer_offload else None
        if optimizer is not None:
            optimizer.move_state(self.settings.device)
        yield
        if optimizer is not None:
            optimizer.move_state(torch.device("cpu"))

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
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
