"""Training backend of a model that Megatron-core divides over processes by tensor, pipeline, expert and data parallelism."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_without_interleaving
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.data.balance import CostModel
from hone.errors import ConfigError
from hone.insight import activity
from hone.models.heads import Head, autocast
from hone.models.inputs import PackedSequences
from hone.models.loading import model_settings
from hone.training.backends.megatron.cpu import on_device
from hone.training.backends.megatron.groups import Groups, build_groups
from hone.training.backends.megatron.mapping import LoadedStage, load_stage
from hone.training.backends.megatron.model import Stage
from hone.training.backends.megatron.optimizer import ShardedOptimizer
from hone.training.backends.megatron.support import require_model, require_settings
from hone.training.backends.protocol import ModelKind, Weights
from hone.training.checkpoints.model_state import check_saved, optimizer_folder, writer_of_all
from hone.training.checkpoints.shards import load_shards, read_index, stage_whole
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.weights import in_layers, stage_layers
from hone.training.engine import LoopBackend, MicroBatchLoop, TrainSettings
from hone.training.export_stream import in_dtype
from hone.training.layout import Meshes
from hone.training.packing import pack
from hone.training.pipeline_loop import LossOf, MicroBatch, PipelineLoop
from hone.training.ranks import ProcessRanks, RankGroup

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
