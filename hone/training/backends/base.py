"""Base class of the training backends: the calls of an update, around the loop over micro-batches."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import Head
from hone.models.kernels.cpu.memory import heap_watch
from hone.models.loading import adapter_off, with_adapter
from hone.training.backends.protocol import Weights
from hone.training.checkpoints.model_state import ModelParts, ModelStager
from hone.training.engine import MicroBatchLoop, TrainSettings
from hone.training.export_stream import STREAMS
from hone.training.optimizer import ScheduledOptimizer
from hone.training.ranks import RankGroup
from hone.training.updates import GatheredRows, LossFn, Outputs, PartialLoss, Statistics, UpdateResult


def model_stager(
    model: nn.Module, optimizer: ScheduledOptimizer | None, stages: ModelParts | None = None
) -> ModelStager:
    """Return what stages the checkpoints of a model and its optimizer; ``stages`` as in :class:`ModelStager`."""
    if optimizer is None:
        return ModelStager(model, None, stages=stages)
    return ModelStager(model, optimizer.inner, optimizer.loss_scale, optimizer.average, stages=stages)


class UpdateRule(Protocol):
    """The optimizer of a model."""

    def begin(self) -> None:
        """Clear the gradients."""
        ...

    def learning_rate(self, step: int) -> float: ...

    def update(self, step: int, grad_norm: float, statistics: list[Statistics]) -> UpdateResult:
        """Update the parameters at schedule position ``step``, unless the norm is not finite, and clear the gradients."""
        ...


Optimizer = TypeVar("Optimizer", bound=UpdateRule)


class LoopBackend(ABC, Generic[Optimizer]):
    """A backend whose passes are a :class:`~hone.training.engine.MicroBatchLoop`.

    :class:`~hone.training.backends.protocol.TrainBackend` documents the methods. A subclass sets ``_loop``, and
    ``_stager`` unless it stages checkpoints in another way.

    Args:
        model: what this rank computes; its training mode follows the pass.
        optimizer: None for a model that is never updated.
    """

    _loop: MicroBatchLoop
    _stager: ModelStager

    def __init__(
        self, model: nn.Module, head: Head, settings: TrainSettings, ranks: RankGroup, optimizer: Optimizer | None
    ) -> None:
        self.model, self.head, self.settings = model, head, settings
        self.optimizer, self._ranks = optimizer, ranks

    @property
    def data_parallel_size(self) -> int:
        return self._ranks.size

    def infer_batch(
        self, batch: Batch, *, with_entropy: bool = False, max_tokens: int | None = None, head: Head | None = None
    ) -> dict[str, Ragged]:
        with self._in_use(), self._passes(train=False):
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
        with self._in_use():
            with self._passes(train=True):
                statistics = self._loop.accumulate_gradients(
                    batch, self.head, loss_fn, with_entropy=with_entropy, outputs_seen=outputs_seen
                )
            return self._apply(step, statistics)

    def begin_update(self) -> None:
        self._trained().begin()

    def accumulate(
        self, batch: Batch, loss: PartialLoss, *, with_entropy: bool = False, outputs_seen: Outputs | None = None
    ) -> None:
        with self._in_use(), self._passes(train=True):
            loss.statistics += self._loop.accumulate_gradients(
                batch,
                self.head,
                loss,
                with_entropy=with_entropy,
                outputs_seen=outputs_seen,
                on_totals=loss.begin_part,
            )

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

    def shared_module(self) -> nn.Module | None:
        return None

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        with self._in_use():
            yield from STREAMS[which](self.model, dtype=dtype)

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        return self._stager.stage(location, name, tokenizer)

    def restore(self, location: str, name: str) -> None:
        self._trained()
        self._stager.restore(location, name)

    def _trained(self) -> Optimizer:
        if self.optimizer is None:
            raise RuntimeError("this backend was built without an optimizer")
        return self.optimizer

    @abstractmethod
    def _gradient_norm(self, optimizer: Optimizer, scale: float) -> float:
        """Sum the gradients of all ranks, multiply them by ``scale`` and clip them. Collective.

        Returns the norm of the gradient before clipping, the same on all ranks.
        """

    def _apply(self, step: int, statistics: list[Statistics], scale: float = 1.0) -> UpdateResult:
        optimizer = self._trained()
        with self._loop.computing(), self._updating():
            norm = self._gradient_norm(optimizer, scale)
            result = optimizer.update(step, norm, self._ranks.gather_statistics(statistics))
            if self.settings.device.type == "cpu":
                heap_watch()()
        return result

    def _in_use(self) -> AbstractContextManager[None]:
        """Have the parameters on the device within the block."""
        return contextlib.nullcontext()

    def _updating(self) -> AbstractContextManager[None]:
        """Have the optimizer's state on the device within the block."""
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def _passes(self, *, train: bool) -> Iterator[None]:
        """Prepare the model for the passes in the block; ``train``: forward and backward, else forward without gradient."""
        self.model.train(train)
        yield
