"""Megatron's distributed optimizer with Hone's schedule: each data-parallel rank updates its share of the parameters."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from hone.config.model import OptimConfig
from hone.config.param_groups import KEY as GROUPS_KEY
from hone.config.param_groups import ParamGroup, assign_groups, read_param_groups
from hone.errors import ConfigError
from hone.training.backends.fsdp2.gradients import sum_of_squares
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.groups import Groups
from hone.training.backends.megatron.mapping import LoadedStage
from hone.training.optimizer import LR_MULT, create_optimizer, group_parameters, learning_rate
from hone.training.updates import Statistics, UpdateResult


class ShardedOptimizer:
    """Gradients and optimizer of a stage.

    ``loaded``: the stage; its parameters move into the buffers of the gradient reduction. ``parameters``: by Megatron's
    names.
    """

    average = None

    def __init__(
        self, loaded: LoadedStage, groups: Groups, config: OptimConfig, total_steps: int, device: torch.device
    ) -> None:
        self.config, self.total_steps = config, total_steps
        self._groups, self._device = groups, device
        settings = _param_groups(loaded, config)
        options = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        with on_device(device):
            self._reduction = DistributedDataParallel(
                loaded.stage.config, options, loaded.stage, pg_collection=groups.collection
            )
            self.parameters: dict[str, nn.Parameter] = dict(loaded.stage.named_parameters())
            self._optimizers = list(self._build(settings))

    def _build(self, settings: Mapping[str, ParamGroup]) -> Iterator[DistributedOptimizer]:
        """Yield the optimizer of the parameters that all data-parallel ranks have, and that of the experts."""
        parts = (
            (self._reduction.buffers, self._groups.data, True),
            (self._reduction.expert_parallel_buffers, self._groups.expert_data, False),
        )
        for buffers, group, shared in parts:
            trained = {
                name: parameter
                for name, parameter in self.parameters.items()
                if getattr(parameter, "allreduce", True) == shared
            }
            if trained:
                yield self._distributed(trained, settings, buffers, group)

    def _distributed(
        self, trained: Mapping[str, nn.Parameter], settings: Mapping[str, ParamGroup], buffers: Any, group: ProcessGroup
    ) -> DistributedOptimizer:
        inner = create_optimizer(group_parameters(trained, settings, self.config), self.config)
        optimizer = DistributedOptimizer(
            inner,
            OptimizerConfig(use_distributed_optimizer=True, lr=self.config.lr),
            grad_scaler=None,  # pyright: ignore[reportArgumentType]
            init_state_fn=None,
            model_chunks=[self._reduction],
            per_model_buffers={0: buffers},
            data_parallel_group=group,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        optimizer.tp_group = self._groups.tensor  # pyright: ignore[reportAttributeAccessIssue]
        return optimizer

    def group_of(self, parameter: nn.Parameter) -> ProcessGroup:
        """Return the ranks that share the update of a parameter."""
        return self._groups.data if getattr(parameter, "allreduce", True) else self._groups.expert_data

    @property
    def chunk(self) -> DistributedDataParallel:
        return self._reduction

    def begin(self) -> None:
        self._reduction.zero_grad_buffer()
        with _expected_warnings():
            for optimizer in self._optimizers:
                optimizer.zero_grad()

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.config, step, self.total_steps)

    def reduce_gradients(self, scale: float) -> float:
        """Sum the gradients over all ranks, multiply them by ``scale``, and clip them. Collective. Returns the norm of
        the whole gradient before clipping, the same on all ranks.
        """
        with on_device(self._device), _expected_warnings():
            finalize_model_grads([self._reduction], pg_collection=self._groups.collection)
            for optimizer in self._optimizers:
                optimizer.prepare_grads()
            grads = [grad for optimizer in self._optimizers for grad in optimizer.get_main_grads_for_grad_norm()]
            squares = torch.zeros((), dtype=torch.float64, device=self._device)
            for grad in grads:
                squares += sum_of_squares(grad)
            dist.all_reduce(squares)
            norm = math.sqrt(float(squares)) * scale
            if math.isfinite(norm):
                factor = scale * min(1.0, self.config.clip_grad / (norm + 1e-6))
                if factor != 1.0:
                    for shard in self._shards():
                        assert shard.grad is not None
                        shard.grad.mul_(factor)
        return norm

    def update(self, step: int, grad_norm: float, statistics: list[Statistics]) -> UpdateResult:
        """Update the parameters at schedule position ``step`` and clear the gradients; if the norm is not finite, only that."""
        finite = math.isfinite(grad_norm)
        if finite:
            with on_device(self._device), _expected_warnings():
                for optimizer in self._optimizers:
                    for group in optimizer.param_groups:
                        group["lr"] = self.learning_rate(step) * group[LR_MULT]
                    optimizer.step_with_ready_grads()
        self.begin()
        return UpdateResult(grad_norm, statistics, finite)

    def state(self, key: str) -> Mapping[str, Tensor]:
        """Return a part of the optimizer's state (``exp_avg``) by Megatron's names; reading one of them is collective."""
        return _GatheredState(self, key)

    @property
    def state_keys(self) -> list[str]:
        return ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(self._optimizers[0].optimizer.defaults["amsgrad"])

    @property
    def kind(self) -> str:
        return type(self._optimizers[0].optimizer).__name__

    def steps(self) -> int:
        """Return the number of updates so far, the same on all ranks. Collective."""
        counts = [float(state["step"]) for optimizer in self._optimizers for state in optimizer.state.values()]
        largest = torch.tensor(max(counts, default=0.0), device=self._device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest)

    def load_state(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Set a part of the state from whole values of this rank's parameters, by Megatron's names."""
        for name, shard, place, optimizer in self.places():
            optimizer.state[shard][key] = tensors[name].reshape(-1)[place].clone()

    def load_steps(self, steps: int) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                device = self._device if group.get("fused") or group.get("capturable") else "cpu"
                for shard in group["params"]:
                    optimizer.state[shard]["step"] = torch.tensor(float(steps), device=device)

    def places(self) -> Iterator[tuple[str, Tensor, slice, DistributedOptimizer]]:
        """Yield the parameters of which this rank updates a shard: name, shard, its place, and optimizer."""
        names = {parameter: name for name, parameter in self.parameters.items()}
        for optimizer in self._optimizers:
            for wholes, shards in zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups, strict=True):
                for whole, shard in zip(wholes, shards, strict=True):
                    place = optimizer._get_model_param_range_map(whole)["param"]
                    yield names[whole], shard, slice(place.start, place.end), optimizer

    def _shards(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from group["params"]


class _GatheredState(Mapping[str, Tensor]):
    """Whole values of a part of the optimizer's state, each gathered from the shards when it is read; the last one is kept."""

    def __init__(self, optimizer: ShardedOptimizer, key: str) -> None:
        self._optimizer, self._key = optimizer, key
        self._places = {name: (shard, place, inner) for name, shard, place, inner in optimizer.places()}
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = name, self._gather(name)
        return self._last[1]

    def _gather(self, name: str) -> Tensor:
        parameter = self._optimizer.parameters[name]
        whole = torch.zeros_like(parameter)
        if name in self._places:
            shard, place, inner = self._places[name]
            if (state := inner.state.get(shard)) is not None:
                whole.view(-1)[place] = state[self._key]
        dist.all_reduce(whole, group=self._optimizer.group_of(parameter))
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self._optimizer.parameters)

    def __len__(self) -> int:
        return len(self._optimizer.parameters)


def _param_groups(loaded: LoadedStage, config: OptimConfig) -> dict[str, ParamGroup]:
    """Return the entry of ``optim.param_groups`` of each of Megatron's parameters that has one.

    Raises ConfigError: an entry applies to no parameter, or to a part of one of Megatron's.
    """
    entries = read_param_groups(config.param_groups)
    by_name = assign_groups(loaded.weights.all_names, entries)
    assigned: dict[str, ParamGroup] = {}
    for source, names in loaded.weights.names().items():
        groups = {by_name.get(name) for name in names}
        if len(groups) > 1:
            raise ConfigError(
                f"{', '.join(names)} belong to different parameter groups",
                why="Megatron-core keeps them in one parameter, which has one learning rate and one weight decay",
                where=GROUPS_KEY,
                fix="expressions that match all of them or none, or actor.strategy=fsdp2",
            )
        if (group := groups.pop()) is not None:
            assigned[source] = group
    return assigned


@contextlib.contextmanager
def _expected_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
        yield
