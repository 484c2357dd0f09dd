"""Training backend of a model that Megatron-core divides over processes by tensor, pipeline, expert and data parallelism."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from transformers import PreTrainedTokenizerBase

from hone.config.model import ModelConfig, OptimConfig
from hone.config.parallel import ParallelConfig
from hone.config.param_groups import KEY as GROUPS_KEY
from hone.config.param_groups import ParamGroup, assign_groups, read_param_groups
from hone.data.balance import CostModel
from hone.errors import ConfigError
from hone.insight import activity
from hone.models.heads import Head, autocast
from hone.models.inputs import PackedSequences
from hone.models.loading import model_settings
from hone.training.backends.fsdp2.gradients import sum_of_squares
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.mapping import LoadedStage, load_stage
from hone.training.backends.megatron.model import Groups, Stage, build_groups
from hone.training.backends.megatron.support import require_model, require_settings
from hone.training.backends.protocol import ModelKind, Weights
from hone.training.checkpoints.model_state import check_saved, optimizer_folder, writer_of_all
from hone.training.checkpoints.shards import load_shards, read_index, stage_whole
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import in_layers, stage_layers
from hone.training.engine import LoopBackend, MicroBatchLoop, TrainSettings
from hone.training.export_stream import in_dtype
from hone.training.layout import Meshes
from hone.training.objectives import Statistics, UpdateResult
from hone.training.optimizer import LR_MULT, create_optimizer, group_parameters, learning_rate
from hone.training.packing import pack
from hone.training.pipeline_loop import LossOf, MicroBatch, PipelineLoop
from hone.training.ranks import ProcessRanks, RankGroup


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


_STEP = "step"


def stage_checkpoint(
    loaded: LoadedStage,
    optimizer: ShardedOptimizer | None,
    device: torch.device,
    location: str,
    name: str,
    tokenizer: PreTrainedTokenizerBase | None,
) -> Callable[[], None]:
    """Copy what this rank writes of model and optimizer. Collective. Returns a function that writes the files, without
    collectives, in any thread and during training.
    """
    checkpoint = Storage(location).recording()
    whole = loaded.weights.whole(loaded.parameters, device)
    writes = [stage_layers(in_layers(whole, loaded.skeleton), loaded.skeleton, checkpoint / name, tokenizer)]
    if optimizer is not None:
        about: dict[str, Any] = {"optimizer": optimizer.kind, "trained": loaded.weights.all_names, "state": {}}
        state = _named_state(loaded, optimizer, device)
        writes.append(stage_whole(state, about, checkpoint / optimizer_folder(name)))
    return writer_of_all(writes, checkpoint, name)


def restore_optimizer(loaded: LoadedStage, optimizer: ShardedOptimizer, location: str, name: str) -> None:
    """Load the optimizer's state of a checkpoint of any backend and layout.

    Raises CheckpointError: the state is of another model or optimizer, or damaged.
    """
    storage = Storage(location) / optimizer_folder(name)
    shapes = {name: parameter.shape for name, parameter in loaded.skeleton.named_parameters()}
    local = {name for names in loaded.weights.names().values() for name in names}
    with storage.restoring():
        index = read_index(storage)
        check_saved(index.values, set(shapes), optimizer.kind, storage)
        steps = {key: torch.zeros(()) for key in index.tensors if key.startswith(f"{_STEP}/")}
        load_shards(steps, storage, index)
        if not steps:
            return  # saved before the first update

        def saved(key: str) -> Iterator[tuple[str, Tensor]]:
            for name in shapes.keys() & local:
                value = torch.zeros(shapes[name])
                load_shards({f"{key}/{name}": value}, storage, index)
                yield name, value

        for key in optimizer.state_keys:
            tensors = {name: torch.zeros_like(parameter) for name, parameter in loaded.parameters.items()}
            loaded.weights.fill(tensors, saved(key))
            optimizer.load_state(key, tensors)
        optimizer.load_steps(int(max(float(step) for step in steps.values())))


def _named_state(
    loaded: LoadedStage, optimizer: ShardedOptimizer, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield the optimizer's state by Hugging Face names. Collective."""
    steps = optimizer.steps()
    if steps == 0:
        return
    for name in loaded.weights.all_names:
        yield f"{_STEP}/{name}", torch.tensor(float(steps))
    for key in optimizer.state_keys:
        for name, value in loaded.weights.whole(optimizer.state(key), device):
            yield f"{key}/{name}", value


class MegatronPipelineLoop(PipelineLoop):
    """Runs batches through a pipeline of Megatron's stages, with or without gradient."""

    def __init__(
        self,
        stage: Stage,
        chunk: DistributedDataParallel | None,
        groups: Groups,
        settings: TrainSettings,
        *,
        ranks: RankGroup,
        cost: CostModel,
    ) -> None:
        super().__init__(_outputs(stage), settings, pipeline=groups.pipeline, ranks=ranks, cost=cost)
        self._stage, self._chunk, self._groups = stage, chunk, groups
        self._communicator = P2PCommunicator(groups.pipeline, stage.config)

    def run(
        self, micro_batches: list[MicroBatch], head: Head, with_entropy: bool, loss_of: LossOf, *, train: bool
    ) -> None:

        def step(remaining: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, None]] | None]:
            del model  # the gradient reduction around the stage
            rows, micro = next(remaining)
            packed = pack(micro, self._device)
            activity.tick()
            with autocast(self._device, self._settings.dtype):
                if not self._groups.last_stage:
                    return self._stage(packed), None
                outputs = packed.outputs_by_row(self._forward(head, packed, with_entropy))
            loss = loss_of(rows, micro, outputs)
            return loss, lambda loss: (loss, torch.zeros((), dtype=torch.int, device=self._device), None)

        with self.computing(), on_device(self._device):
            forward_backward_pipelining_without_interleaving(
                forward_step_func=step,
                data_iterator=iter(micro_batches),
                model=self._stage if self._chunk is None else self._chunk,
                num_microbatches=len(micro_batches),
                seq_length=1,  # shapes are sent before hidden states
                micro_batch_size=1,
                forward_only=not train,
                p2p_communicator=self._communicator,
                pg_collection=self._groups.collection,
            )


def _outputs(stage: Stage) -> Callable[[Head, PackedSequences, bool], dict[str, Tensor]]:
    return lambda head, packed, with_entropy: head(stage, packed, with_entropy=with_entropy)


class MegatronBackend(LoopBackend[ShardedOptimizer]):
    """This rank's stage of a model and its optimizer. It has no adapters, so there is no reference mode."""

    def __init__(self, loaded: LoadedStage, groups: Groups, head: Head, settings: TrainSettings) -> None:
        stage, optim = loaded.stage, settings.optim
        optimizer = ShardedOptimizer(loaded, groups, optim, settings.total_steps, settings.device) if optim else None
        if optim is None:
            stage.requires_grad_(False)
        super().__init__(stage, head, settings, ProcessRanks(groups.data, settings.device), optimizer)
        self._loaded, self._stage = loaded, stage
        cost = CostModel.from_config(loaded.skeleton.config.to_dict())
        if groups.layout.pipeline > 1:
            chunk = optimizer and optimizer.chunk
            self._loop = MegatronPipelineLoop(stage, chunk, groups, settings, ranks=self._ranks, cost=cost)
        else:
            self._loop = MicroBatchLoop(_outputs(stage), settings, ranks=self._ranks, cost=cost)

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

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if which == "adapter":
            return
        for name, value in self._loaded.weights.whole(self._loaded.parameters, self.settings.device):
            yield name, in_dtype(value, dtype)

    def stage(self, location: str, name: str, tokenizer: PreTrainedTokenizerBase | None = None) -> Callable[[], None]:
        return stage_checkpoint(self._loaded, self.optimizer, self.settings.device, location, name, tokenizer)

    def restore(self, location: str, name: str) -> None:
        restore_optimizer(self._loaded, self._trained(), location, name)

    @contextlib.contextmanager
    def _passes(self, *, train: bool) -> Iterator[None]:
        device, dtype = self.settings.device, self.settings.dtype
        with super()._passes(train=train), contextlib.ExitStack() as stack:
            if self._stage.config.num_moe_experts is not None:  # other layers do not name the CUDA device
                stack.enter_context(on_device(device))
            if device.type == "cpu":  # Megatron's linear layers restore autocast in their backward pass on CUDA only
                stack.enter_context(autocast(device, dtype))
            yield

    def _gradient_norm(self, optimizer: ShardedOptimizer, scale: float) -> float:
        return optimizer.reduce_gradients(scale)
