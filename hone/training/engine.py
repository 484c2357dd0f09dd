"""The loop that all training backends share: it takes a mini-batch through a model, one micro-batch at a time.

A backend provides the forward pass of a packed micro-batch and the ranks that share a mini-batch. The loop plans, packs,
normalises and gives all ranks the same number of micro-batches. The backend applies the gradient: :class:`LoopBackend` has the calls of
an update around the loop.
"""

from __future__ import annotations

import contextlib
import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from hone.config.limits import micro_batch_tokens
from hone.config.model import OptimConfig
from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.data.images import IMAGES
from hone.data.ragged import Ragged
from hone.errors import ModelError
from hone.insight import activity
from hone.models.devices import deterministic_algorithms, dtype_on
from hone.models.dropout import say_what_is_off
from hone.models.experts import CHOSEN, SCORES, ExpertRouters, RouterCounts, balance_losses
from hone.models.heads import Head, autocast
from hone.models.inputs import PackedSequences
from hone.models.kernels.cpu.matmul import fast_float32_matmuls
from hone.models.kernels.cpu.memory import heap_watch
from hone.models.loading import adapter_off, with_adapter
from hone.models.offload import ActivationOffload
from hone.progress import ON_DONE
from hone.training.checkpoints.model_state import ModelParts, ModelStager
from hone.training.export_stream import STREAMS
from hone.training.microbatches import MicroBatchRecorder
from hone.training.objectives import GatheredRows, LossFn, PartialLoss, Statistics, Totals, UpdateResult
from hone.training.optimizer import LossScale, ScheduledOptimizer
from hone.training.packing import pack, plan_micro_batches
from hone.training.ranks import RankGroup

BALANCE_KEY = "actor_rollout_ref.actor.router_aux_loss_coef"


class DeviceClock:
    """Adds up the durations of blocks on a device.

    On CUDA the host only queues work, so its own clock would measure the launches. There a block is timed by two events on the
    current stream: from the moment at which the device reaches the block until it has computed all of it. Only :meth:`take` waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._events: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Count the block."""
        if not self._on_cuda:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        yield
        end.record()
        self._events.append((start, end))

    def take(self) -> float:
        """Return the seconds since the last call; on CUDA after the device has computed all blocks."""
        events, self._events = self._events, []
        if events:
            events[-1][1].synchronize()
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in events) / 1e3
        self._seconds = 0.0
        return seconds


class Outputs:
    """The head's outputs for the response tokens of a batch, collected micro-batch by micro-batch."""

    def __init__(self, responses: Ragged) -> None:
        self._positions = responses.with_values(torch.arange(len(responses.values)))
        self._tokens = len(responses.values)
        self._parts: list[tuple[Tensor, dict[str, Tensor]]] = []

    def for_rows(self, rows: Sequence[int]) -> Outputs:
        """Return a collector for a mini-batch of these rows; what it collects is also here."""
        part = copy.copy(self)
        part._positions = self._positions.select(rows)
        return part

    def add(self, rows: list[int], outputs: dict[str, Tensor]) -> None:
        """Add the outputs of a micro-batch with these rows. They stay on their device until :meth:`columns`."""
        index = self._positions.select(rows).values
        values_of = {name: values.detach()[: len(index)] for name, values in outputs.items()}
        self._parts.append((index, {n: x.float() if x.is_floating_point() else x for n, x in values_of.items()}))

    def columns(self) -> dict[str, Ragged]:
        """Return ragged columns on the CPU, aligned with ``response_ids``, one per output of the head.

        A token that was added several times has its last output.
        """
        columns: dict[str, Ragged] = {}
        for index, outputs in self._parts:
            for name, values in outputs.items():
                if name not in columns:
                    whole = torch.zeros(self._tokens, *values.shape[1:], dtype=values.dtype)
                    columns[name] = self._positions.with_values(whole)
                columns[name].values[index] = values.cpu()
        return columns


Forward = Callable[[Head, PackedSequences, bool], dict[str, Tensor]]
"""(head, packed micro-batch, with_entropy) to the head's outputs, each ``[U]``; with a gradient where it is enabled."""


@dataclass(frozen=True)
class TrainSettings:
    """Settings of forward and backward passes, the same for every backend."""

    device: torch.device
    optim: OptimConfig | None = None  # None for a model that is never updated
    dtype: str = "float32"  # of the computation; ``auto`` becomes the device's on creation; parameters stay float32
    max_tokens: int = 16384  # of a micro-batch
    max_sequences: int | None = None  # rows of a micro-batch
    total_steps: int = 1  # horizon of the learning-rate schedule
    offload_activations: bool = False  # to host memory, between forward and backward pass
    compile_layers: str = "auto"  # see :mod:`hone.models.compiled`
    deterministic: bool = False  # gradients have the same bits in every run, also on a GPU
    balances_experts: bool = False  # the loss function gets the balance loss of the routers, as output ``balance``

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", dtype_on(self.device, self.dtype))


class MicroBatchLoop:
    """Runs batches through a model, with or without gradient.

    Args:
        routers: of a mixture of experts, which ``forward`` lets follow the engine's choices; None for other models.
        reads_images: whether the model reads images; ranks agree then in which micro-batches they compute its vision tower.

    Attributes:
        recorder: saves the next micro-batch that is trained on; None saves nothing.
    """

    def __init__(
        self,
        forward: Forward,
        settings: TrainSettings,
        *,
        ranks: RankGroup,
        cost: CostModel | None = None,
        loss_scale: LossScale | None = None,
        routers: ExpertRouters | None = None,
        reads_images: bool = False,
    ) -> None:
        self._reads_images = reads_images
        self._forward, self._settings, self._ranks, self._cost = forward, settings, ranks, cost
        self._device, self._loss_scale, self._routers = settings.device, loss_scale, routers
        if settings.balances_experts and routers is None:
            raise ModelError(
                "the model has no routers whose loads can be balanced",
                why="the balance loss is computed from their scores",
                fix=f"{BALANCE_KEY}=0",
                where=BALANCE_KEY,
            )
        self._clock = DeviceClock(settings.device)
        self.recorder: MicroBatchRecorder | None = None
        moves = settings.offload_activations and settings.device.type != "cpu"
        self._offload = ActivationOffload(settings.device) if moves else None

    def infer(
        self, batch: Batch, head: Head, *, with_entropy: bool = False, max_tokens: int | None = None
    ) -> dict[str, Ragged]:
        """Run the forward pass without gradient. Returns ragged columns on the CPU, aligned with ``response_ids``, one
        per output of the head.
        """
        outputs = Outputs(batch.ragged("response_ids"))
        with torch.no_grad(), self._own_routing_after():
            for rows, micro, sees in self.micro_batches(batch, max_tokens or self._settings.max_tokens):
                packed = pack(micro, self._device, sees=sees)
                with self.computing(), autocast(self._device, self._settings.dtype):
                    outputs.add(rows, packed.outputs_by_row(self._forward(head, packed, with_entropy)))
                ON_DONE.get()(len(rows))
        return outputs.columns()

    def accumulate_gradients(
        self,
        batch: Batch,
        head: Head,
        loss_fn: LossFn,
        *,
        with_entropy: bool = False,
        outputs_seen: Outputs | None = None,
        on_totals: Callable[[Totals], None] | None = None,
    ) -> list[Statistics]:
        """Run forward and backward passes over ``batch``; gradients accumulate in the parameters.

        ``on_totals``: receives the totals over all ranks first. Returns statistics of this rank's micro-batches.
        """
        totals = self._ranks.sum_totals(Totals.from_batch(batch))
        if on_totals is not None:
            on_totals(totals)
        with self._own_routing_after():
            return self._accumulate(batch, head, loss_fn, totals, with_entropy, outputs_seen)

    def _accumulate(
        self,
        batch: Batch,
        head: Head,
        loss_fn: LossFn,
        totals: Totals,
        with_entropy: bool,
        outputs_seen: Outputs | None,
    ) -> list[Statistics]:
        statistics: list[Statistics] = []
        for rows, micro, sees in self.micro_batches(batch, self._settings.max_tokens):
            packed = pack(micro, self._device, sees=sees)
            recorder, self.recorder = self.recorder, None
            recording = contextlib.nullcontext() if recorder is None else recorder.forward(packed)
            if self._routers is not None:
                self._routers.count(keep=self._settings.balances_experts)
            on_host = contextlib.nullcontext() if self._offload is None else self._offload.saving()
            with self.computing(), autocast(self._device, self._settings.dtype), on_host, recording:
                outputs = packed.outputs_by_row(self._forward(head, packed, with_entropy))
            scores, chosen = (outputs.pop(name, None) for name in (SCORES, CHOSEN))
            if recorder is not None:
                recorder.keep_gradients(outputs)
            if outputs_seen is not None:
                outputs_seen.add(rows, outputs)
            if scores is not None and chosen is not None:
                outputs["balance"] = balance_losses(scores, chosen, micro.ragged("response_mask"))
            loss, micro_statistics = micro_batch_loss(rows, micro, outputs, loss_fn, totals)
            statistics += micro_statistics
            factor = 1.0 if self._loss_scale is None else self._loss_scale.value
            with self.computing(), deterministic_algorithms(self._settings.deterministic):
                (loss if factor == 1.0 else loss * factor).backward()
            if self._routers is not None and rows:
                statistics[-1] |= router_statistics(self._routers.take_counts())
            if recorder is not None:
                recorder.write(micro, outputs, loss, totals, factor)
        return statistics

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """Count the block's time as computation, and use the fastest exact kernel for float32 matmuls."""
        with self._clock.running(), fast_float32_matmuls(self._device):
            yield

    @contextlib.contextmanager
    def _own_routing_after(self) -> Iterator[None]:
        """Let the routers choose for themselves again after the block: an engine may sample with the same module."""
        try:
            yield
        finally:
            if self._routers is not None:
                self._routers.release()

    def take_busy_seconds(self) -> float:
        return self._clock.take()

    def micro_batches(self, batch: Batch, max_tokens: int) -> Iterator[tuple[list[int], Batch, bool]]:
        """Yield the indices and rows of each micro-batch, and whether some rank has images in it.

        Ranks with fewer micro-batches get fillers, with no indices.
        """
        max_tokens = micro_batch_tokens(max_tokens, on_cpu=self._device.type == "cpu")
        prompts, responses = batch.ragged("prompt_ids"), batch.ragged("response_ids")
        together = batch.tensor("unit") if "unit" in batch else None  # the sides of a preference stay together
        plan = self._plan(prompts, responses, max_tokens, together)
        images = batch.objects(IMAGES) if IMAGES in batch else None
        sees = [images is not None and any(images[row] for row in rows) for rows in plan]
        if self._reads_images:
            sees = self._ranks.any_rank(sees)
        for done, (rows, seen) in enumerate(zip(plan, sees, strict=True), 1):
            yield rows, batch.reorder(rows) if rows else _filler(), seen
            activity.tick(done, len(plan))

    def _plan(self, prompts: Ragged, responses: Ragged, max_tokens: int, together: Tensor | None) -> list[list[int]]:
        """Return the rows of each micro-batch; ranks with fewer rows get empty ones, so that all have the same number."""
        limit = self._settings.max_sequences
        plan = plan_micro_batches(prompts, responses, max_tokens, limit, together) if len(prompts) else []
        count = self._ranks.largest(len(plan))
        if not plan:
            return [[] for _ in range(count)]
        if len(plan) == count and self._ranks.size == 1:
            return plan
        return plan_micro_batches(prompts, responses, max_tokens, limit, together, count=count, cost=self._cost)


def micro_batch_loss(
    rows: list[int], micro: Batch, outputs: dict[str, Tensor], loss_fn: LossFn, totals: Totals
) -> tuple[Tensor, list[Statistics]]:
    """Return the loss of a micro-batch with its statistics; a filler has a loss of zero and none."""
    if not rows:
        return torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0, []
    lengths = micro.ragged("response_ids").lengths
    ragged = {name: Ragged.from_lengths(values.float(), lengths) for name, values in outputs.items()}
    loss, statistics = loss_fn(ragged, micro, totals)
    return loss, [statistics]


def router_statistics(counts: RouterCounts) -> Statistics:
    """Return the load of the experts in one micro-batch, and how often the engine's choice was another than the router's."""
    chosen = counts.chosen.double()
    share = chosen / chosen.sum(1, keepdim=True).clamp(min=1)
    tokens = float(chosen[0].sum())
    probabilities = counts.probabilities / counts.probabilities.sum(1, keepdim=True).clamp(min=1)
    statistics: Statistics = {
        "moe/balance_loss": (float((share * probabilities).sum(1).mean()) * chosen.shape[1], tokens),
        "moe/max_load": (float(share.max(1).values.mean()) * chosen.shape[1], tokens),
        "moe/idle_experts": (float((chosen == 0).double().mean()), tokens),
    }
    if replayed := int(counts.replayed):
        statistics["moe/changed_experts"] = (float(counts.changed) / replayed, float(replayed))
        statistics["moe/replayed"] = (replayed / float(chosen.sum()), tokens)
    return statistics


def _filler() -> Batch:
    """Return the shortest possible batch: one prompt token and one response token."""
    token = Ragged.from_rows([[0]], torch.int64)
    return Batch({"prompt_ids": token, "response_ids": token, "response_mask": token})


def train_batches(
    train_batch: Callable[..., UpdateResult],
    batch: Batch,
    loss_fn: LossFn,
    minis: Sequence[Sequence[int]],
    *,
    step: int,
    with_entropy: bool = False,
    gives_old_log_probs: bool = False,
    keep_last: bool = False,
    prepare: Callable[[Batch, bool], Batch] | None = None,
) -> tuple[list[UpdateResult], dict[str, Ragged]]:
    """Apply the optimizer updates of one step, one for each mini-batch. Collective.

    Args:
        train_batch: of the backend (:class:`~hone.training.backends.protocol.TrainBackend`).
        minis: rows of each mini-batch, in the order of the updates.
        gives_old_log_probs: return ``log_probs`` and ``entropy`` of the response tokens from the forward pass of the single
            update, under the weights before it.
        keep_last: return ``new_log_probs`` from the forward pass of the last update of each token.
        prepare: adds the columns that the loss needs of the whole mini-batch; its second argument is whether it is the first.
    """
    if gives_old_log_probs and len(minis) != 1:
        raise RuntimeError(
            f"gives_old_log_probs needs 1 update, got {len(minis)}: only the first forward pass uses the weights that sampled"
        )
    outputs = Outputs(batch.ragged("response_ids")) if gives_old_log_probs or keep_last else None
    results: list[UpdateResult] = []
    for rows in [range(len(batch))] if gives_old_log_probs else minis:
        mini = batch if gives_old_log_probs else batch.reorder(rows)
        seen = None if outputs is None else outputs.for_rows(rows)
        if prepare is not None:
            mini = prepare(mini, not results)
        results.append(train_batch(mini, loss_fn, step=step, with_entropy=with_entropy, outputs_seen=seen))
    columns = outputs.columns() if outputs else {}
    new = {"new_log_probs": columns["log_probs"]} if keep_last else {}
    return results, (columns if gives_old_log_probs else {}) | new


Weights = Literal["all", "adapter", "merged"]
"""``all`` parameters by the module's names; only the ``adapter``; or ``merged`` parameters, with adapters added to the base."""


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
        if optimizer is not None:
            say_what_is_off(model)

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
