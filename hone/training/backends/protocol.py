"""The protocol of training backends, which the roles of a run use.

Each process of the model's group has one backend. All of them call the methods marked *collective*, in the same order.
Data-parallel ranks pass different rows; ranks that share a row's work pass the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.models.heads import Head
from hone.training.engine import Outputs, TrainSettings, Weights
from hone.training.layout import Meshes
from hone.training.objectives import GatheredRows, LossFn, PartialLoss, UpdateResult

ModelKind = Literal["policy", "frozen", "value", "reward"]
"""A trained ``policy`` (with adapters if configured), a ``frozen`` policy, a ``value`` model, or a trained ``reward`` model."""


class TrainBackend(Protocol):
    """A model, its optimizer, and their updates."""

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
    ) -> TrainBackend:
        """Load a model and create its backend. Collective.

        Args:
            meshes: the process groups; None if one process has the whole model.
            seed: of the run; new adapters are initialised from it.

        Raises:
            ModelError: the model cannot be loaded or sharded with this layout.
        """
        ...

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks with different rows of a batch."""
        ...

    def infer_batch(
        self, batch: Batch, *, with_entropy: bool = False, max_tokens: int | None = None, head: Head | None = None
    ) -> dict[str, Ragged]:
        """Run the forward pass without gradient. Collective.

        Args:
            batch: this rank's rows, columns ``prompt_ids`` and ``response_ids``.
            max_tokens: token budget of a micro-batch; None for the budget of the settings.
            head: to use instead of the backend's.

        Returns:
            Ragged columns on the CPU, aligned with ``response_ids``, one per output of the head.
        """
        ...

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        step: int,
        with_entropy: bool = False,
        outputs_seen: Outputs | None = None,
    ) -> UpdateResult:
        """Run forward and backward passes and one optimizer update over a mini-batch. Collective.

        The division of rows over ranks and micro-batches changes numbers only by rounding. The update is skipped if the
        gradient is not finite.

        Args:
            step: position in the learning-rate schedule (0 is the first).
            outputs_seen: collects the head's outputs, with the weights before the update.

        Returns:
            Gradient norm and statistics of the whole mini-batch, the same on every rank.

        Raises:
            RuntimeError: the backend was built without an optimizer.
        """
        ...

    def begin_update(self) -> None:
        """Begin an update whose mini-batch comes in parts: :meth:`accumulate` for each, then :meth:`apply_gradients`.

        Raises RuntimeError: the backend was built without an optimizer.
        """
        ...

    def accumulate(
        self, batch: Batch, loss: PartialLoss, *, with_entropy: bool = False, outputs_seen: Outputs | None = None
    ) -> None:
        """Run forward and backward passes over a part of a mini-batch; gradients add up. Collective. ``loss``: loss of
        the mini-batch, which also collects the statistics.
        """
        ...

    def apply_gradients(self, step: int, loss: PartialLoss) -> UpdateResult:
        """Apply the gradients of all parts; see :meth:`train_batch`. Collective."""
        ...

    def gather_rows(self, local: Batch) -> GatheredRows:
        """Return the rows of all data-parallel ranks, and the indices of this rank's rows. Collective."""
        ...

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of schedule position ``step``; 0 without an optimizer."""
        ...

    def take_busy_seconds(self) -> float:
        """Return the seconds of forward, backward and optimizer since the last call; on CUDA, wait until they were
        computed.
        """
        ...

    def reference_mode(self, adapter: Mapping[str, Tensor] | None = None) -> AbstractContextManager[None]:
        """Compute as the policy before training inside the block: with the saved adapter it began with, or without one.

        ``adapter``: weights by their names in the adapter's file; None switches the adapter off.

        Raises TypeError: the model has no adapter.
        """
        ...

    def shared_module(self) -> nn.Module | None:
        """Return the trained module if this process has all of its parameters, else None.

        An engine in the same process reads it, and so do transports of shared memory. With None an engine gets its weights
        from :meth:`export_weights`.
        """
        ...

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and whole parameters. Collective: every rank iterates to the end.

        A tensor is valid until the next one, and may be the parameter itself.

        Args:
            which: all parameters, those of the adapter, or those of the model with a merged adapter.
            dtype: of matrices, such as that of an engine which computes in bfloat16; None keeps the dtype of the parameters.
        """
        ...

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        """Copy weights and optimizer state for a checkpoint (docs/checkpoints.md has the format). Collective.

        ``name``: "actor" or "critic". Returns a function that writes the files, without collectives, in any thread and
        during training.
        """
        ...

    def restore(self, location: str, name: str) -> None:
        """Load the optimizer state of a checkpoint of any layout; weights are loaded from its model directory. Collective.

        Raises CheckpointError: the state is of another model or optimizer, or damaged.
        """
        ...
