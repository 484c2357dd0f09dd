"""Training backend of a model in one process."""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.models.compiled import compile_layers
from hone.models.experts import expert_routers
from hone.models.heads import Head
from hone.models.inputs import PackedSequences
from hone.models.loading import (
    load_policy,
    load_reward_model,
    load_value_model,
    narrow_frozen_matrices,
    set_model_padding,
)
from hone.training.backends.protocol import ModelKind
from hone.training.engine import LoopBackend, MicroBatchLoop, TrainSettings, model_stager
from hone.training.layout import Meshes
from hone.training.microbatches import MicroBatchRecorder, MicroBatchTarget
from hone.training.optimizer import ScheduledOptimizer
from hone.training.ranks import SingleRank


class LocalBackend(LoopBackend[ScheduledOptimizer]):
    """A whole model and its optimizer; :class:`~hone.training.backends.protocol.TrainBackend` documents the methods.

    Args:
        model: a Hugging Face module (adapters included), on the settings' device. Its frozen matrices may become narrower.
    """

    def __init__(self, model: nn.Module, head: Head, settings: TrainSettings) -> None:
        narrow_frozen_matrices(model, settings.device, settings.dtype)
        self._compiled = compile_layers(model, settings.device, settings.compile_layers)
        optim, scaled = settings.optim, settings.dtype == "float16"
        optimizer = ScheduledOptimizer(model, optim, settings.total_steps, scaled=scaled) if optim else None
        super().__init__(model, head, settings, SingleRank(), optimizer)
        self._routers = expert_routers(model)
        self._loop = MicroBatchLoop(
            self._forward,
            settings,
            ranks=self._ranks,
            loss_scale=optimizer and optimizer.loss_scale,
            routers=self._routers,
        )
        self._stager = model_stager(model, optimizer)

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

    def save_next_micro_batch(self, target: MicroBatchTarget) -> None:
        self._loop.recorder = MicroBatchRecorder(self.model, self.settings.dtype, target)

    def shared_module(self) -> nn.Module:
        return self.model

    def _forward(self, head: Head, packed: PackedSequences, with_entropy: bool) -> dict[str, Tensor]:
        if self._compiled is not None:
            packed = self._compiled.traceable(packed)
        if self._routers is not None:
            self._routers.follow(packed.experts)
        outputs = head(self.model, packed, with_entropy=with_entropy)
        return outputs if self._routers is None else outputs | self._routers.take_kept(packed)

    def _gradient_norm(self, optimizer: ScheduledOptimizer, scale: float) -> float:
        optimizer.scale(scale)
        return float(nn.utils.clip_grad_norm_(optimizer.parameters, optimizer.config.clip_grad))
