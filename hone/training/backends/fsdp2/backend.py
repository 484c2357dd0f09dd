"""Training backend of a model that is sharded over processes.

Data-parallel ranks get different rows of a mini-batch; the other ranks of a shard get the same rows. Totals, gradient norm
and statistics are those of the whole mini-batch on every rank, and so are decisions based on them.
"""

from __future__ import annotations

import contextlib
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForTokenClassification, PreTrainedModel

from hone.config.model import ModelConfig
from hone.config.parallel import FsdpConfig, ParallelConfig
from hone.data.balance import CostModel
from hone.errors import ModelError
from hone.models.compiled import compile_layers
from hone.models.experts import expert_routers
from hone.models.heads import Head
from hone.models.images import attach_processor, find_processor, vision_tower
from hone.models.kernels import cuda as kernels
from hone.models.llama import cuda as llama_cuda
from hone.models.llama import train as llama_train
from hone.models.llama.spec import replace_layer_forwards, supports
from hone.models.loading import (
    REWARD_SETTINGS,
    VALUE_SETTINGS,
    as_policy,
    as_reward_model,
    causal_lm,
    image_processor,
    layers_of,
    load_empty,
    policy_factory,
    prepare,
    reward_factory,
    set_model_padding,
    value_head,
)
from hone.models.streaming import WeightFiles, fill, materialise
from hone.training.backends.fsdp2.gradients import clip_gradients
from hone.training.backends.fsdp2.pipeline import Computation, Fsdp2PipelineLoop, StageComputation, Stages
from hone.training.backends.fsdp2.ring import check_dropout
from hone.training.backends.fsdp2.sequence_parallel import check_heads
from hone.training.backends.fsdp2.tensor_parallel import add_partial_gradients, apply_tensor_parallel
from hone.training.backends.protocol import ModelKind, Weights
from hone.training.engine import LoopBackend, MicroBatchLoop, TrainSettings, model_stager
from hone.training.layout import Meshes
from hone.training.optimizer import ScheduledOptimizer
from hone.training.ranks import ProcessRanks

SIZE_KEY = "actor_rollout_ref.actor.expert_parallel_size"


def experts_of(model: nn.Module) -> list[nn.Module]:
    """Return the experts modules of ``model``, whose parameters have one slice per expert."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "num_experts", None), int)
        and (parameters := dict(module.named_parameters(recurse=False)))
        and all(parameter.dim() > 1 and parameter.shape[0] == module.num_experts for parameter in parameters.values())
        and "expert" in type(module).__name__.lower()
    ]


def apply_expert_parallel(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Divide the experts of every layer over ``mesh`` and return the experts modules.

        tokens of this rank -> (token, expert) pairs, sorted by expert -> all-to-all -> this rank's experts
                            <- weighted by the router, summed          <- all-to-all <-

    It works on transformers' experts modules, which have all experts in one parameter and are called with
    ``(hidden [T, H], chosen experts [T, K], their weights [T, K])``: Qwen3-MoE, Mixtral, GPT-OSS and others.

    Raises:
        ModelError: the model has no experts, or their number is not divisible.
    """
    modules = experts_of(model)
    if not modules:
        raise ModelError(
            f"{type(model).__name__} has no experts to divide over {mesh.size()} ranks",
            where=SIZE_KEY,
            fix=f"{SIZE_KEY}=1",
        )
    for experts in modules:
        count = int(experts.num_experts)  # type: ignore[arg-type]
        if count % mesh.size():
            raise ModelError(
                f"{count} experts cannot be divided over {mesh.size()} ranks",
                where=SIZE_KEY,
                fix=f"{SIZE_KEY}=<a divisor of {count}>",
            )
        for name, parameter in list(experts.named_parameters(recurse=False)):
            divided = distribute_tensor(parameter.data, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(divided, requires_grad=parameter.requires_grad))
        experts.num_experts = count // mesh.size()  # type: ignore[assignment]
        experts.forward = types.MethodType(_dispatched(type(experts).forward, mesh.get_group()), experts)
    return modules


def _dispatched(compute: Callable[..., Tensor], group: ProcessGroup) -> Callable[..., Tensor]:
    """Return the forward pass of an experts module divided over ``group``; ``compute`` is its original forward."""

    def forward(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        ranks, each = dist.get_world_size(group), experts.num_experts
        expert_of = chosen.flatten()
        order = expert_of.argsort(stable=True)
        token_of = order // chosen.shape[1]
        sent = torch.bincount(expert_of // each, minlength=ranks)
        arriving = torch.empty_like(sent)
        dist.all_to_all_single(arriving, sent, group=group)
        sent_counts, received_counts = sent.tolist(), arriving.tolist()
        rows = _AllToAll.apply(hidden[token_of], sent_counts, received_counts, group)
        expert = expert_of.new_empty(len(rows))
        dist.all_to_all_single(expert, expert_of[order] % each, received_counts, sent_counts, group=group)
        # an additional row of zeros, so that a rank without tokens uses its parameters, which the gradient sum requires
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
        expert = torch.cat([expert, expert.new_zeros(1)])[:, None]
        with _local_parameters(experts):
            computed = compute(experts, rows, expert, rows.new_ones(len(rows), 1))[:-1]
        back = _AllToAll.apply(computed, received_counts, sent_counts, group)
        weighted = back * weights.flatten()[order, None]
        return torch.zeros_like(hidden).index_add(0, token_of, weighted.to(hidden.dtype))

    return forward


@contextlib.contextmanager
def _local_parameters(experts: nn.Module) -> Iterator[None]:
    kept = dict(experts._parameters)
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in kept.items()}
    experts._parameters.update(local)  # type: ignore[arg-type]
    try:
        yield
    finally:
        experts._parameters.update(kept)


class _AllToAll(torch.autograd.Function):
    """Exchange of rows: ``sent_counts[r]`` rows to rank r, ``received_counts[r]`` rows from it."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent_counts: list[int], received_counts: list[int], group: ProcessGroup
    ) -> Tensor:
        ctx.settings = (sent_counts, received_counts, group)
        received = rows.new_empty(sum(received_counts), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), received_counts, sent_counts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sent_counts, received_counts, group = ctx.settings
        received = grads[0].new_empty(sum(sent_counts), *grads[0].shape[1:])
        dist.all_to_all_single(received, grads[0].contiguous(), sent_counts, received_counts, group=group)
        return received, None, None, None


@dataclass(frozen=True)
class Sharded:
    """A sharded model."""

    computation: Computation
    partial: list[nn.Module]  # gradients must be summed over the tensor-parallel ranks
    stages: Stages | None = None  # None if every rank has all layers

    @property
    def root(self) -> FSDPModule:
        assert isinstance(self.computation, FSDPModule)
        return self.computation


def shard_model(model: nn.Module, meshes: Meshes, config: FsdpConfig, dtype: str, compiling: str = "never") -> Sharded:
    """Shard ``model`` by the layout of ``meshes``. Its parameters may be on the meta device.

    ``compiling``: ``model.compile_layers``. Layers that several ranks compute together stay uncompiled. Raises
    ModelError: the model cannot be sharded with this layout.
    """
    inner, layout = causal_lm(model), meshes.layout
    _check(inner, meshes)
    partial = apply_tensor_parallel(inner, meshes.parameters["tensor"]) if layout.tensor > 1 else []
    experts = apply_expert_parallel(model, meshes.experts["expert"]) if meshes.experts is not None else []
    narrow = _narrower(config.mixed_precision.param_dtype or dtype)
    device = torch.device(meshes.parameters.device_type)
    fused, stages = _fuse_layers(inner, device, narrow), None
    computation: Computation
    if layout.pipeline > 1:
        stages = Stages(model, meshes.pipeline_group, device)
        computation = StageComputation(model, meshes, stages, narrow or torch.float32)
        kept = set(model.modules())
        partial, experts = ([module for module in modules if module in kept] for modules in (partial, experts))
    else:
        computation = Computation(model, meshes, expert_routers(model))
        if not fused and layout.tensor == layout.ranks_a_row == 1 and not experts:
            computation.compiled = compile_layers(model, device, compiling)
    settings = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=narrow, reduce_dtype=getattr(torch, config.mixed_precision.reduce_dtype)
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        if config.offload_policy
        else OffloadPolicy(),
    }
    for module in experts:
        fully_shard(module, mesh=meshes.expert_fsdp, reshard_after_forward=config.reshard_after_forward, **settings)
    tower = vision_tower(inner)
    layers = [layer for layer in layers_of(inner) if tower is None or layer not in set(tower.modules())]
    for layer in (*layers, *([] if tower is None else [tower])):
        fully_shard(layer, mesh=meshes.fsdp, reshard_after_forward=config.reshard_after_forward, **settings)
    fully_shard(computation, mesh=meshes.fsdp, reshard_after_forward=False, **settings)
    if not experts and meshes.parameters.device_type == "cuda":
        prefetch_neighbours(computation, layers)
    for module in computation.modules():
        if isinstance(module, FSDPModule):  # losses are shares of the batch's loss, so gradients are summed
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Sharded(computation, partial, stages)


def _fuse_layers(model: PreTrainedModel, device: torch.device, narrow: torch.dtype | None) -> bool:
    """Let Hone's executors compute the layers of a Llama-shaped model; return False for others."""
    if device.type == "cpu" and narrow is None and supports(model):
        replace_layer_forwards(model, llama_train.layer_forward)
    elif device.type == "cuda" and kernels.available(device) and llama_cuda.is_supported_model(model):
        replace_layer_forwards(model, llama_cuda.layer_forward)
    else:
        return False
    return True


def prefetch_neighbours(root: nn.Module, layers: list[nn.Module]) -> None:
    """Start the gathering of a layer's parameters at the beginning of the layer before it, in both passes.

    Otherwise FSDP starts it when the host reaches the layer, which is late where the host is slower than the GPU. No
    number changes, and as many layers are whole at a time. ``layers``: in the order of the forward pass.
    """
    chain = [module for module in (root, *layers) if isinstance(module, FSDPModule)]
    for module, following in itertools.pairwise(chain):
        module.set_modules_to_forward_prefetch([following])
    for module, former in itertools.pairwise(reversed(chain[1:])):
        module.set_modules_to_backward_prefetch([former])


def _narrower(name: str) -> torch.dtype | None:
    return None if name == "float32" else getattr(torch, name)


def _check(model: PreTrainedModel, meshes: Meshes) -> None:
    if meshes.layout.context > 1:
        check_dropout(getattr(model.get_decoder().config, "attention_dropout", 0.0))
    if meshes.layout.sequence > 1:
        config = model.get_decoder().config
        heads = config.num_attention_heads // meshes.layout.tensor
        key_value = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        check_heads(heads, key_value // meshes.layout.tensor, meshes.layout.sequence)


def load_sharded(
    kind: ModelKind, config: ModelConfig, settings: TrainSettings, *, fsdp: FsdpConfig, meshes: Meshes, seed: int
) -> Sharded:
    """Create parameters without storage, shard them, and load the shards one tensor at a time. Collective. Raises
    ModelError: the model cannot be loaded or sharded with this layout.
    """
    model, files = _empty(kind, config, seed)
    sharded = shard_model(model, meshes, fsdp, settings.dtype, settings.compile_layers)
    materialise(sharded.computation, torch.device("cpu") if fsdp.offload_policy else settings.device)
    fill(causal_lm(model), files, fresh=("score.", "classifier.") if kind in ("value", "reward") else ())
    return sharded


def _empty(kind: ModelKind, config: ModelConfig, seed: int) -> tuple[nn.Module, WeightFiles]:
    if kind == "reward":
        factory = reward_factory(config)
        model, files = load_empty(factory, config, **REWARD_SETTINGS)
        ready = as_reward_model(model, factory, config, seed=seed, trainable=True)
        set_model_padding(ready, config)
        return ready, files
    if kind != "value":
        model, files = load_empty(policy_factory(config), config)
        attach_processor(model, image_processor(config))
        return as_policy(model, config, seed=seed, trainable=kind == "policy"), files
    model, files = load_empty(AutoModelForTokenClassification, config, **VALUE_SETTINGS)
    value_head(model)
    prepare(model, config)
    return model, files


class Fsdp2Backend(LoopBackend[ScheduledOptimizer]):
    """This rank's shards of a model and its optimizer; see :class:`~hone.training.backends.protocol.TrainBackend`."""

    def __init__(self, sharded: Sharded, head: Head, settings: TrainSettings, *, fsdp: FsdpConfig) -> None:
        model, meshes, stages = sharded.computation.model, sharded.computation.meshes, sharded.stages
        optim = settings.optim
        scaled = "float16" in (settings.dtype, fsdp.mixed_precision.param_dtype)
        names = None if stages is None else stages.trained
        optimizer = (
            ScheduledOptimizer(model, optim, settings.total_steps, scaled=scaled, names=names) if optim else None
        )
        super().__init__(model, head, settings, ProcessRanks(meshes.data_group, settings.device), optimizer)
        self.fsdp, self._sharded, self._meshes, self._stages = fsdp, sharded, meshes, stages
        cost = CostModel.from_config(causal_lm(model).config.to_dict())
        shared = {"ranks": self._ranks, "cost": cost, "loss_scale": optimizer and optimizer.loss_scale}
        if isinstance(sharded.computation, StageComputation):
            self._loop = Fsdp2PipelineLoop(sharded.computation, settings, **shared)
        else:
            self._loop = MicroBatchLoop(
                sharded.computation,
                settings,
                routers=sharded.computation.routers,
                reads_images=find_processor(causal_lm(model)) is not None,
                **shared,
            )
        self._stager = model_stager(model, optimizer, stages)
        self._offload_parameters()

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
        if meshes is None:
            raise RuntimeError("fsdp2 needs the meshes of a layout")
        fsdp = parallel.fsdp_config
        sharded = load_sharded(kind, model, settings, fsdp=fsdp, meshes=meshes, seed=seed)
        return cls(sharded, head, settings, fsdp=fsdp)

    def export_weights(
        self, which: Weights = "all", *, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        if self._stages is None:
            yield from super().export_weights(which, dtype=dtype)
            return
        with self._in_use():
            yield from self._stages.export(which, dtype=dtype)

    def restore(self, location: str, name: str) -> None:
        super().restore(location, name)
        if self.optimizer is not None and self.fsdp.optimizer_offload:
            self.optimizer.move_state(torch.device("cpu"))

    def _gradient_norm(self, optimizer: ScheduledOptimizer, scale: float) -> float:
        if self._meshes.layout.tensor > 1:
            add_partial_gradients(self._sharded.partial, self._meshes.tensor_group)
        stages = self._stages
        if stages is not None:
            stages.add_shared_gradient()
        optimizer.scale(scale)
        return clip_gradients(
            optimizer.parameters,
            optimizer.config.clip_grad,
            self.settings.device,
            stages=self._meshes.layout.pipeline,
            shared=None if stages is None else stages.shared,
        )

    @contextlib.contextmanager
    def _passes(self, *, train: bool) -> Iterator[None]:
        with super()._passes(train=train):
            yield
        if not train:
            self._sharded.root.reshard()  # without a backward pass the last gathered parameters would stay in memory

    @contextlib.contextmanager
    def _updating(self) -> Iterator[None]:
        optimizer = self.optimizer if self.fsdp.optimizer_offload else None
        if optimizer is not None:
            optimizer.move_state(self.settings.device)
        yield
        if optimizer is not None:
            optimizer.move_state(torch.device("cpu"))

    @contextlib.contextmanager
    def _in_use(self) -> Iterator[None]:
        if self.fsdp.param_offload:
            self._move_parameters(self.settings.device)
        try:
            yield
        finally:
            self._offload_parameters()

    def _offload_parameters(self) -> None:
        if self.fsdp.param_offload:
            self._move_parameters(torch.device("cpu"))

    def _move_parameters(self, device: torch.device) -> None:
        if not self.fsdp.offload_policy:  # with offload_policy FSDP keeps the shards on the host
            self.model.to(device)
