"""Sharding of a model without storage: tensor, expert, context and sequence parallelism, then FSDP2."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from hone.config.parallel import FsdpConfig
from hone.models.compiled import CompiledLayers, compile_layers
from hone.models.experts import expert_routers
from hone.models.heads import Head, reads_targets
from hone.models.images import vision_tower
from hone.models.inputs import PackedSequences
from hone.models.kernels import cuda as kernels
from hone.models.llama import cuda as llama_cuda
from hone.models.llama import train as llama_train
from hone.models.llama.spec import replace_layer_forwards, supports
from hone.models.loading import causal_lm, layers_of
from hone.training.backends.fsdp2.expert_parallel import apply_expert_parallel
from hone.training.backends.fsdp2.pipeline import StageComputation
from hone.training.backends.fsdp2.ring import check_dropout
from hone.training.backends.fsdp2.sequence_parallel import check_heads, gather_outputs, local_tokens
from hone.training.backends.fsdp2.stages import Stages
from hone.training.backends.fsdp2.tensor_parallel import apply_tensor_parallel
from hone.training.layout import Meshes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Computation(nn.Module):
    """A model with its head's computation as one module.

    FSDP gathers parameters at the call of a module, but a head calls submodules of a model, never the model itself.

    Args:
        model: a Hugging Face module with its adapters.
        meshes: the process groups.
    """

    def __init__(self, model: nn.Module, meshes: Meshes) -> None:
        super().__init__()
        self.model, self.meshes = model, meshes
        self.compiled: CompiledLayers | None = None
        self.routers = expert_routers(model)

    def forward(self, head: Head, packed: PackedSequences, with_entropy: bool) -> dict[str, Tensor]:
        """Return the head's outputs for the whole packed row, on every rank that shares it."""
        if self.meshes.layout.ranks_a_row == 1:
            if self.compiled is not None:
                packed = self.compiled.traceable(packed)
            self._follow(packed)
            return head(self.model, packed, with_entropy=with_entropy)
        local, indices = local_tokens(packed.at_targets() if reads_targets(head) else packed, self.meshes)
        self._follow(local)
        outputs = head(self.model, local, with_entropy=with_entropy)
        group = self.meshes.row_group
        return {name: gather_outputs(values, indices, len(packed.targets), group) for name, values in outputs.items()}

    def _follow(self, packed: PackedSequences) -> None:
        if self.routers is not None:
            self.routers.follow(packed.experts)


@dataclass(frozen=True)
class Sharded:
    """A sharded model.

    Attributes:
        computation: the module to call; its parameters are this rank's shards.
        partial: modules whose gradients must be summed over the tensor-parallel ranks.
        stages: the division into pipeline stages; None if every rank has all layers.
    """

    computation: Computation | StageComputation
    partial: list[nn.Module]
    stages: Stages | None = None

    @property
    def root(self) -> FSDPModule:
        """The same module with FSDP's methods."""
        assert isinstance(self.computation, FSDPModule)
        return self.computation


def shard_model(model: nn.Module, meshes: Meshes, config: FsdpConfig, dtype: str, compiling: str = "never") -> Sharded:
    """Shard ``model`` by the layout of ``meshes``. Its parameters may be on the meta device.

    Args:
        model: a Hugging Face module with its adapters.
        config: of FSDP.
        dtype: compute dtype.
        compiling: ``model.compile_layers``. Layers that several ranks compute together stay uncompiled.

    Raises:
        ModelError: the model cannot be sharded with this layout.
    """
    inner, layout = causal_lm(model), meshes.layout
    _check(inner, meshes)
    partial = apply_tensor_parallel(inner, meshes.parameters["tensor"]) if layout.tensor > 1 else []
    experts = apply_expert_parallel(model, meshes.experts["expert"]) if meshes.experts is not None else []
    narrow = _narrower(config.mixed_precision.param_dtype or dtype)
    device = torch.device(meshes.parameters.device_type)
    fused, stages = _fuse_layers(inner, device, narrow), None
    computation: Computation | StageComputation
    if layout.pipeline > 1:
        stages = Stages(model, meshes.pipeline_group, device)
        computation = StageComputation(model, meshes, stages, narrow or torch.float32)
        kept = set(model.modules())
        partial, experts = ([module for module in modules if module in kept] for modules in (partial, experts))
    else:
        computation = Computation(model, meshes)
        if not fused and layout.tensor == layout.ranks_a_row == 1 and not experts:
            computation.compiled = compile_layers(model, device, compiling)
    settings = {
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=narrow,
            reduce_dtype=DTYPES[config.mixed_precision.reduce_dtype],
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
    """Let Hone's executors compute the layers of a Llama-shaped model; returns False for others, which keep their forward passes."""
    if device.type == "cpu" and narrow is None and supports(model):
        replace_layer_forwards(model, llama_train.layer_forward)
    elif device.type == "cuda" and kernels.available(device) and llama_cuda.is_supported_model(model):
        replace_layer_forwards(model, llama_cuda.layer_forward)
    else:
        return False
    return True


def prefetch_neighbours(root: nn.Module, layers: list[nn.Module]) -> None:
    """Start the gathering of a layer's parameters at the beginning of the layer before it, in both passes.

    Otherwise FSDP starts it when the host reaches the layer, which is late where the host is slower than the GPU. No number changes,
    and as many layers are whole at a time.

    Args:
        root: the sharded module that contains the layers.
        layers: sharded modules, in the order of the forward pass.
    """
    chain = [module for module in (root, *layers) if isinstance(module, FSDPModule)]
    for module, following in itertools.pairwise(chain):
        module.set_modules_to_forward_prefetch([following])
    for module, former in itertools.pairwise(reversed(chain[1:])):
        module.set_modules_to_backward_prefetch([former])


def _narrower(name: str) -> torch.dtype | None:
    return None if name == "float32" else DTYPES[name]


def _check(model: PreTrainedModel, meshes: Meshes) -> None:
    if meshes.layout.context > 1:
        check_dropout(getattr(model.get_decoder().config, "attention_dropout", 0.0))
    if meshes.layout.sequence > 1:
        config = model.get_decoder().config
        heads = config.num_attention_heads // meshes.layout.tensor
        key_value = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        check_heads(heads, key_value // meshes.layout.tensor, meshes.layout.sequence)
