"""Training inside a role: forward without gradient, forward and backward with an update, save and load.

One interface for every way to hold a model; this one keeps it whole on one device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.config.model import OptimConfig
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.generation.products import fast_float32_products
from hone.insight import activity
from hone.training.activations import activations_on_host
from hone.training.checkpoints.model_state import ModelStager
from hone.training.export_stream import STREAMS
from hone.training.heads import Head, autocast
from hone.training.memory import heap_watch
from hone.training.optimizer import build_optimizer, learning_rate
from hone.training.packing import PackedSequences, pack, plan_micro_batches

CPU_TOKENS = 4608
"""Most tokens of a micro-batch on the CPU, whatever the budget: more of them is not faster there, and takes more memory."""


@dataclass(frozen=True)
class Totals:
    """Counts over a whole mini-batch, by which every micro-batch normalises: so the split changes nothing.

    Attributes:
        tokens: response tokens with mask 1.
        sequences: rows with at least one of them.
    """

    tokens: int
    sequences: int

    @classmethod
    def of(cls, batch: Batch) -> Totals:
        """Count column ``response_mask``."""
        mask = batch.ragged("response_mask")
        sums = torch.zeros(len(batch)).index_add_(
            0, torch.arange(len(batch)).repeat_interleave(mask.lengths), mask.values.float().cpu()
        )
        return cls(int(sums.sum()), int((sums > 0).sum()))


Statistics = dict[str, tuple[Tensor | float, float]]
"""Metric name to (value, weight) of one micro-batch."""

LossFn = Callable[[dict[str, Ragged], Batch, Totals], tuple[Tensor, Statistics]]
"""(outputs of the head, micro-batch, totals) to (this micro-batch's share of the loss, statistics)."""


WholeBatch = Callable[[Batch], tuple[Batch, Sequence[int]]]
"""This rank's rows to the rows of all ranks, and which of them are its own."""


@dataclass
class UpdateResult:
    """One optimizer update.

    Attributes:
        grad_norm: before clipping.
        statistics: of each micro-batch, in order.
        applied: false when the gradient was not finite and the update was skipped.
    """

    grad_norm: float
    statistics: list[Statistics]
    applied: bool


class Outputs:
    """What a head gave for the response tokens of a batch, collected micro-batch by micro-batch.

    Args:
        responses: column ``response_ids`` of the batch.
    """

    def __init__(self, responses: Ragged) -> None:
        self._places = responses.with_values(torch.arange(len(responses.values)))
        self._where: list[Tensor] = []
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, rows: list[int], outputs: dict[str, Tensor]) -> None:
        """Take the outputs of a micro-batch of these rows; they stay on its device until all are asked for."""
        where = self._places.select(rows).values
        self._where.append(where)
        for name, values in outputs.items():
            self._parts.setdefault(name, []).append(values.detach()[: len(where)].float())

    def columns(self) -> dict[str, Ragged]:
        """Ragged columns on the CPU, aligned with ``response_ids``, one per output of the head."""
        columns = {}
        for name, parts in self._parts.items():
            values = torch.zeros(len(self._places.values))
            values[torch.cat(self._where)] = torch.cat(parts).cpu()
            columns[name] = self._places.with_values(values)
        return columns


class TrainEngine:
    """A model, its optimizer, and how a batch goes through them.

    Args:
        model: a Hugging Face module (adapters included), on ``device``.
        head: what is computed of each response token.
        optim: optimizer settings; None for a model that is never updated.
        dtype: compute dtype, float32 or bfloat16; parameters stay float32.
        max_tokens: token budget of a micro-batch.
        max_sequences: at most this many rows a micro-batch, or None.
        total_steps: horizon of the learning-rate schedule.
        offload_activations: keep them in the host's memory between forward and backward pass.
    """

    def __init__(
        self,
        model: nn.Module,
        head: Head,
        *,
        optim: OptimConfig | None = None,
        device: torch.device,
        dtype: str = "float32",
        max_tokens: int = 16384,
        max_sequences: int | None = None,
        total_steps: int = 1,
        offload_activations: bool = False,
    ) -> None:
        self.model, self.head, self.optim_config = model, head, optim
        self.device, self.dtype = device, dtype
        self.max_tokens, self.max_sequences, self.total_steps = max_tokens, max_sequences, total_steps
        self.optimizer = build_optimizer(model, optim) if optim else None
        self._stager = ModelStager(model, self.optimizer)
        self._offload_activations = offload_activations
        self._busy = 0.0

    def infer_batch(
        self, batch: Batch, *, with_entropy: bool = False, max_tokens: int | None = None, head: Head | None = None
    ) -> dict[str, Ragged]:
        """Forward without gradient, through the engine's head or another one.

        Returns:
            Ragged columns on the CPU, aligned with ``response_ids``, one per output of the head.
        """
        self.model.eval()
        found = Outputs(batch.ragged("response_ids"))
        with torch.no_grad():
            for rows, micro in self._micro_batches(batch, max_tokens or self.max_tokens):
                packed = pack(micro, self.device)
                with self._computing(), autocast(self.device, self.dtype):
                    found.add(rows, self._forward(head or self.head, packed, with_entropy))
                activity.tick()
        return found.columns()

    def train_batch(
        self,
        batch: Batch,
        loss_fn: LossFn,
        *,
        step: int,
        with_entropy: bool = False,
        outputs_seen: Outputs | None = None,
    ) -> UpdateResult:
        """Forward, backward and one optimizer update over the whole of ``batch``.

        Args:
            batch: one mini-batch; cut into micro-batches by the token budget.
            loss_fn: the share of a micro-batch in the mini-batch's loss; shares add up.
            step: position in the learning-rate schedule (0 is the first).
            with_entropy: whether the head also computes entropy.
            outputs_seen: takes what the head gives on the way, under the weights before the update.
        """
        if self.optimizer is None or self.optim_config is None:
            raise RuntimeError("this engine was built without an optimizer")
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        totals = self._totals(batch)
        statistics: list[Statistics] = []
        for rows, micro in self._micro_batches(batch, self.max_tokens):
            lengths = micro.ragged("response_ids").lengths
            packed = pack(micro, self.device)
            on_host = activations_on_host(self.device, self._offload_activations)
            with self._computing(), autocast(self.device, self.dtype), on_host:
                outputs = self._forward(self.head, packed, with_entropy)
            if outputs_seen is not None:
                outputs_seen.add(rows, outputs)
            ragged = {name: Ragged.from_lengths(values.float(), lengths) for name, values in outputs.items()}
            if rows:
                loss, seen = loss_fn(ragged, micro, totals)
                statistics.append(seen)
            else:  # a micro-batch that only keeps step with other ranks
                loss = torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
            with self._computing():
                loss.backward()
            activity.tick()
        with self._computing():
            result = self._apply(step, statistics)
            if self.device.type == "cpu":
                heap_watch()()
        return result

    def whole_batch(self, own: Batch) -> tuple[Batch, Sequence[int]]:
        """The rows of all data-parallel ranks, and which of them are this rank's: here the same."""
        return own, range(len(own))

    def take_busy_seconds(self) -> float:
        """Seconds spent in forward, backward and optimizer since the last call."""
        busy, self._busy = self._busy, 0.0
        return busy

    def learning_rate(self, step: int) -> float:
        """Learning rate of schedule position ``step``."""
        return learning_rate(self.optim_config, step, self.total_steps) if self.optim_config else 0.0

    def export_weights(self, which: str = "all") -> Iterator[tuple[str, Tensor]]:
        """Names and parameters, as Hugging Face names them, one at a time; no copies of those that are there.

        Args:
            which: ``all`` parameters by the module's names; only the ``adapter``; or ``merged``, the adapter worked into the
                base and names as without it.
        """
        yield from STREAMS[which](self.model)

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        """Copy model and optimizer state for the checkpoint at ``location``; returns the writing, for any thread.

        Every rank calls it. See :class:`hone.training.checkpoints.model_state.ModelStager`.
        """
        return self._stager.stage(location, name, tokenizer)

    def restore(self, location: str, name: str) -> None:
        """Take up the optimizer state of a checkpoint; weights come with its model directory."""
        self._stager.restore(location, name)

    def to(self, device: torch.device) -> None:
        """Move model and optimizer state."""
        self.model.to(device)
        self.device = device
        for state in self.optimizer.state.values() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        started = time.perf_counter()
        with fast_float32_products(self.device):
            yield
        self._busy += time.perf_counter() - started

    def _micro_batches(self, batch: Batch, max_tokens: int) -> Iterator[tuple[list[int], Batch]]:
        if self.device.type == "cpu":
            max_tokens = min(max_tokens, CPU_TOKENS)
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        together = batch.tensor("unit") if "unit" in batch else None  # the sides of a preference stay together
        for rows in self._plan(prompts, responses.lengths, max_tokens, together):
            yield rows, batch.reorder(rows) if rows else _filler()

    def _plan(self, prompts: Ragged, responses: Tensor, max_tokens: int, together: Tensor | None) -> list[list[int]]:
        return plan_micro_batches(prompts, responses, max_tokens, self.max_sequences, together)

    def _totals(self, batch: Batch) -> Totals:
        return Totals.of(batch)

    def _forward(self, head: Head, packed: PackedSequences, with_entropy: bool) -> dict[str, Tensor]:
        return head(self.model, packed, with_entropy=with_entropy)

    def _clip_gradients(self, trainable: list[nn.Parameter], largest: float) -> float:
        """Scale the gradient down to norm ``largest``; returns its norm before."""
        return float(nn.utils.clip_grad_norm_(trainable, largest))

    def _of_all_ranks(self, statistics: list[Statistics]) -> list[Statistics]:
        return statistics

    def _apply(self, step: int, statistics: list[Statistics]) -> UpdateResult:
        assert self.optimizer is not None and self.optim_config is not None
        trainable = [parameter for _, parameter in self._trainable()]
        grad_norm = self._clip_gradients(trainable, self.optim_config.clip_grad)
        finite = grad_norm == grad_norm and grad_norm != float("inf")
        if finite:
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return UpdateResult(grad_norm, self._of_all_ranks(statistics), finite)

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]


def _filler() -> Batch:
    """The shortest batch that goes through a model: one token after another."""
    token = Ragged.from_rows([[0]], torch.int64)
    return Batch({"prompt_ids": token, "response_ids": token, "response_mask": token})
