"""Training backend of a model that Megatron-core divides over processes by tensor, pipeline, expert and data parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.errors import ConfigError
from hone.models.heads import Head, autocast
from hone.models.inputs import PackedSequences
from hone.models.kernels.cpu.memory import heap_watch
from hone.models.loading import adapter_off, model_settings
from hone.training.backends.megatron.checkpoint import restore_optimizer, stage_checkpoint
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.groups import Groups, build_groups
from hone.training.backends.megatron.loading import LoadedStage, load_stage
from hone.training.backends.megatron.optimizer import ShardedOptimizer
from hone.training.backends.megatron.pipeline import MegatronPipelineLoop
from hone.training.backends.megatron.support import require_model, require_settings
from hone.training.backends.protocol import ModelKind, Weights
from hone.training.engine import MicroBatchLoop, TrainSettings
from hone.training.export_stream import in_dtype
from hone.training.layout import Meshes
from hone.training.ranks import ProcessRanks
from hone.training.updates import GatheredRows, LossFn, Outputs, PartialLoss, Statistics, UpdateResult


class MegatronBackend:
    """This rank's stage of a model and its optimizer; see :class:`~hone.training.backends.protocol.TrainBackend`.

    Args:
        loaded: this rank's stage, with weights.
        groups: process groups.
        head: computes the outputs for each response token.
        settings: device, dtype, optimizer and the budget of a micro-batch.
    """

    def __init__(self, loaded: LoadedStage, groups: Groups, head: Head, settings: TrainSettings) -> None:
        self.head, self.settings = head, settings
        self._loaded, self._stage, self._groups = loaded, loaded.stage, groups
        optim = settings.optim
        self.optimizer = (
            ShardedOptimizer(loaded, groups, optim, settings.total_steps, settings.device) if optim else None
        )
        if optim is None:
            self._stage.requires_grad_(False)
        self._ranks = ProcessRanks(groups.data, settings.device)
        cost = CostModel.from_config(loaded.skeleton.config.to_dict())
        if groups.layout.pipeline > 1:
            chunk = self.optimizer and self.optimizer.chunk
            self._loop = MegatronPipelineLoop(loaded.stage, chunk, groups, settings, ranks=self._ranks, cost=cost)
        else:
            self._loop = MicroBatchLoop(self._forward, settings, ranks=self._ranks, cost=cost)

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
        """Load this rank's part of a model. Collective.

        Raises:
            ConfigError: a setting is not supported.
            ModelError: the model cannot be loaded, or not with this backend and layout.
        """
        del seed
        require_settings(model, settings.optim, parallel)
        require_model(model_settings(model).to_dict(), parallel, model.path)
        if kind == "reward":
            raise ConfigError(
                "strategy=megatron does not train reward models",
                where=parallel.key("strategy"),
                fix=f"{parallel.key('strategy')}=fsdp2",
            )
        groups = build_groups(meshes, settings.device)
        return cls(load_stage(kind, model, groups, settings.device), groups, head, settings)

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with different rows of a batch."""
        return self._ranks.size

    def infer_batch(
        self, batch: Batch, *, with_entropy: bool = False, max_tokens: int | None = None, head: Head | None = None
    ) -> dict[str, Ragged]:
        """Run the forward pass without gradient; every rank gets the columns of its rows. Collective."""
        self._stage.eval()
        with self._passes():
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
        """Run one optimizer update; ``batch`` has this rank's rows of the mini-batch (possibly none). Collective."""
        self.begin_update()
        self._stage.train()
        with self._passes():
            statistics = self._loop.accumulate_gradients(
                batch, self.head, loss_fn, with_entropy=with_entropy, outputs_seen=outputs_seen
            )
        return self._apply(step, statistics)

    def begin_update(self) -> None:
        """Begin an update without gradients."""
        if self.optimizer is None:
            raise RuntimeError("this backend was built without an optimizer")
        self.optimizer.begin()

    def accumulate(
        self, batch: Batch, loss: PartialLoss, *, with_entropy: bool = False, outputs_seen: Outputs | None = None
    ) -> None:
        """Run forward and backward passes over this rank's rows of a part of a mini-batch; gradients add up. Collective."""
        self._stage.train()
        with self._passes():
            self._loop.accumulate_part(batch, self.head, loss, with_entropy=with_entropy, outputs_seen=outputs_seen)

    def apply_gradients(self, step: int, loss: PartialLoss) -> UpdateResult:
        """Apply the gradients of all parts. Collective."""
        return self._apply(step, loss.statistics, loss.scale)

    def gather_rows(self, local: Batch) -> GatheredRows:
        """Return the rows of all data-parallel ranks, and the indices of this rank's rows. Collective."""
        return self._ranks.gather_rows(local)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of schedule position ``step``."""
        return self.optimizer.learning_rate(step) if self.optimizer else 0.0

    def take_busy_seconds(self) -> float:
        """Return the seconds of forward, backward and optimizer since the last call."""
        return self._loop.take_busy_seconds()

    def reference_mode(self, adapter: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        """Raise: adapters are not supported, so the model has none."""
        return adapter_off(self._stage)

    def shared_module(self) -> None:
        """Return None: the modules are Megatron's."""
        return

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole parameters; every rank gets the same. Collective."""
        if which == "adapter":
            return
        for name, value in self._loaded.weights.whole(self._loaded.parameters, self.settings.device):
            yield name, in_dtype(value, dtype)

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        """Copy this rank's data for the checkpoint at ``location``; return the function that writes it. Collective."""
        return stage_checkpoint(self._loaded, self.optimizer, self.settings.device, location, name, tokenizer)

    def restore(self, location: str, name: str) -> None:
        """Load the optimizer state of a checkpoint of any layout. Collective."""
        if self.optimizer is None:
            raise RuntimeError("this backend was built without an optimizer")
        restore_optimizer(self._loaded, self.optimizer, location, name)

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """Run forward and backward passes of Megatron's layers within the block on the device of the settings."""
        device, dtype = self.settings.device, self.settings.dtype
        with contextlib.ExitStack() as stack:
            if self._stage.config.num_moe_experts is not None:  # other layers do not name the CUDA device
                stack.enter_context(on_device(device))
            if device.type == "cpu":  # Megatron's linear layers restore autocast in their backward pass on CUDA only
                stack.enter_context(autocast(device, dtype))
            yield

    def _forward(self, head: Head, packed: PackedSequences, with_entropy: bool) -> dict[str, Tensor]:
        return head(self._stage, packed, with_entropy=with_entropy)

    def _apply(self, step: int, statistics: list[Statistics], scale: float = 1.0) -> UpdateResult:
        optimizer = self.optimizer
        assert optimizer is not None
        with self._loop.computing():
            grad_norm = optimizer.reduce_gradients(scale)
            result = optimizer.update(step, grad_norm, self._ranks.gather_statistics(statistics))
            if self.settings.device.type == "cpu":
                heap_watch()()
        return result
