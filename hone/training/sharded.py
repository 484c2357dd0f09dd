"""The engine of a model that is divided over processes: the same loop, with what the ranks must agree on.

Data-parallel ranks get different rows of a mini-batch, the ranks of one shard the same rows. Counts, the gradient's norm and
the statistics are those of the whole mini-batch, on every rank; so is every decision that follows from them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hone.config.parallel import FsdpConfig
from hone.data.balance import CostModel
from hone.data.batch import Batch
from hone.data.ragged import Ragged
from hone.training.engine import Statistics, Totals, TrainEngine, UpdateResult
from hone.training.heads import Head
from hone.training.packing import PackedSequences, plan_micro_batches
from hone.training.sharding import Sharded
from hone.training.tensor_parallel import add_partial_gradients


class ShardedEngine(TrainEngine):
    """A divided model. Every method is collective: all ranks of the layout call it in the same order.

    Args:
        sharded: this rank's part, filled with weights.
        head: what is computed of each response token.
        fsdp: where shards are kept while they are not in use.
        device: where the work is done.
        settings: as for :class:`TrainEngine`.
    """

    def __init__(
        self, sharded: Sharded, head: Head, *, fsdp: FsdpConfig, device: torch.device, **settings: Any
    ) -> None:
        super().__init__(sharded.computation.model, head, device=device, **settings)
        self.sharded, self.fsdp, self.meshes = sharded, fsdp, sharded.computation.meshes
        self._cost = CostModel.of_model(self.model.config.to_dict())  # type: ignore[union-attr]
        self._rest()

    def infer_batch(
        self, batch: Batch, *, with_entropy: bool = False, max_tokens: int | None = None, head: Head | None = None
    ) -> dict[str, Ragged]:
        """Forward without gradient; every rank gets the columns of its own rows."""
        with self._in_use(optimizer=False):
            columns = super().infer_batch(batch, with_entropy=with_entropy, max_tokens=max_tokens, head=head)
            self.sharded.root.reshard()  # without a backward pass the last gathered parameters would stay
        return columns

    def train_batch(self, batch: Batch, *args: Any, **kwargs: Any) -> UpdateResult:
        """One optimizer update; ``batch`` holds this data-parallel rank's rows of the mini-batch (perhaps none)."""
        with self._in_use(optimizer=not self.fsdp.optimizer_offload):
            return super().train_batch(batch, *args, **kwargs)

    def whole_batch(self, own: Batch) -> tuple[Batch, Sequence[int]]:
        """The rows of all data-parallel ranks, and which of them are this rank's."""
        parts: list[Any] = [None] * self.meshes.layout.dp_size
        dist.all_gather_object(parts, own, group=self.meshes.data_group)
        place = self.meshes.data.get_local_rank("data")
        before = sum(len(part) for part in parts[:place])
        return Batch.concat([part for part in parts if len(part)]), range(before, before + len(own))

    def export_weights(self, which: str = "all") -> Iterator[tuple[str, Tensor]]:
        """Names and whole parameters, one at a time; every rank must take them all, and gets the same."""
        with self._in_use(optimizer=False):
            yield from super().export_weights(which)

    def restore(self, location: str, name: str) -> None:
        """Take up the optimizer state of a checkpoint of any layout."""
        super().restore(location, name)
        if self.fsdp.optimizer_offload:
            self._place_optimizer(torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        """Move this rank's shards and optimizer state; passes are made where they are then."""
        self._place(self.model, device)
        self._place_optimizer(device)
        self.device = device

    def _forward(self, head: Head, packed: PackedSequences, with_entropy: bool) -> dict[str, Tensor]:
        return self.sharded.computation(head, packed, with_entropy)

    def _totals(self, batch: Batch) -> Totals:
        own = Totals.of(batch)
        counts = torch.tensor([own.tokens, own.sequences], dtype=torch.int64, device=self.device)
        dist.all_reduce(counts, group=self.meshes.data_group)
        tokens, sequences = counts.tolist()
        return Totals(tokens, sequences)

    def _plan(self, prompts: Ragged, responses: Tensor, max_tokens: int, together: Tensor | None) -> list[list[int]]:
        plan = super()._plan(prompts, responses, max_tokens, together) if len(prompts) else []
        most = torch.tensor(len(plan), device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.meshes.data_group)
        count = int(most)
        if not plan:
            return [[] for _ in range(count)]
        if len(plan) == count and self.meshes.layout.dp_size == 1:
            return plan
        return plan_micro_batches(
            prompts, responses, max_tokens, self.max_sequences, together, count=count, cost=self._cost
        )

    def _clip_gradients(self, trainable: list[nn.Parameter], largest: float) -> float:
        if self.meshes.layout.tensor > 1:
            add_partial_gradients(self.sharded.partial, self.meshes.tensor_group)
        grads = [parameter.grad for parameter in trainable if parameter.grad is not None]
        norm = gradient_norm(grads, self.device)
        if math.isfinite(norm) and norm > largest:
            for grad in grads:
                _local(grad).mul_(largest / (norm + 1e-6))
        return norm

    def _of_all_ranks(self, statistics: list[Statistics]) -> list[Statistics]:
        own = [{name: (float(value), float(weight)) for name, (value, weight) in seen.items()} for seen in statistics]
        gathered: list[Any] = [None] * self.meshes.layout.dp_size
        dist.all_gather_object(gathered, own, group=self.meshes.data_group)
        return [seen for of_rank in gathered for seen in of_rank]

    def _apply(self, step: int, statistics: list[Statistics]) -> UpdateResult:
        if not self.fsdp.optimizer_offload:
            return super()._apply(step, statistics)
        self._place_optimizer(self.device)
        result = super()._apply(step, statistics)
        self._place_optimizer(torch.device("cpu"))
        return result

    @contextlib.contextmanager
    def _in_use(self, *, optimizer: bool) -> Iterator[None]:
        """Within the block offloaded shards are where the work is done."""
        if self.fsdp.param_offload:
            self._place(self.model, self.device)
        try:
            yield
        finally:
            self._rest()

    def _rest(self) -> None:
        if self.fsdp.param_offload:
            self._place(self.model, torch.device("cpu"))

    def _place(self, module: nn.Module, device: torch.device) -> None:
        if not self.fsdp.offload_policy:  # FSDP itself keeps the shards on the host then
            module.to(device)

    def _place_optimizer(self, device: torch.device) -> None:
        for state in self.optimizer.state.values() if self.optimizer else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and key != "step":
                    state[key] = value.to(device)


def gradient_norm(grads: list[Tensor], device: torch.device) -> float:
    """Norm of a gradient of which each rank holds shards, the same on all ranks. Copies of a shard count once."""
    world, total = dist.get_world_size(), 0.0
    for grad in grads:
        shards = 1
        if isinstance(grad, DTensor):
            sizes = zip(grad.placements, grad.device_mesh.shape, strict=True)
            shards = math.prod(size for placement, size in sizes if not placement.is_replicate())
        total += float(_local(grad).double().square().sum()) * shards / world
    squares = torch.tensor(total, dtype=torch.float64, device=device)
    dist.all_reduce(squares)
    return math.sqrt(float(squares))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
