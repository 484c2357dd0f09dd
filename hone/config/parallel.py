"""Sharding of a model over the processes of its group: keys of ``actor_rollout_ref.actor``, and of the root of the offline trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hone.config.fields import block, choice, named, number


@dataclass
class MixedPrecisionConfig:
    """Dtypes of FSDP's communication."""

    param_dtype: str | None = choice(None, "float32", "bfloat16", "float16")
    """Dtype of all-gathered parameters and of computation; null means the compute dtype of the model
    (dtype). The shards stay float32."""
    reduce_dtype: str = choice("float32", "float32", "bfloat16")
    """Dtype in which gradients are summed over ranks."""


@dataclass
class FsdpConfig:
    """Fully sharded data parallel: shards of parameters, gradients and optimizer state."""

    fsdp_size: int = -1
    """Ranks over which one copy of the parameters is sharded; -1 means all. A smaller number makes copies (hybrid sharding):
    gradients are summed within a copy, then between copies, for nodes with a slow network between them."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass and gather them again in the backward pass: less memory,
    50 % more communication."""
    offload_policy: bool = False
    """Keep shards of parameters, gradients and optimizer state in the host's memory and update them there. A last resort when
    memory is short: each layer is copied to the device when it is needed."""
    param_offload: bool = False
    """Keep the shards of parameters in the host's memory while the model is not in use; they are on the device during
    passes and updates."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in the host's memory except during the optimizer's step."""
    mixed_precision: MixedPrecisionConfig = block(MixedPrecisionConfig)
    """Dtypes of communication."""


@dataclass
class ParallelConfig:
    """The training backend and the parallel sizes. The sizes multiplied must divide the number of processes; the remaining
    factor is data parallel."""

    block_path: ClassVar[str] = ""
    """Path of the block in its tree; empty for the root."""

    def key(self, name: str) -> str:
        """Return the full key of a field of this block, for messages."""
        return f"{self.block_path}.{name}" if self.block_path else name

    strategy: str | None = named(None, "training backend")
    """The training backend. local: one process holds the whole model; fsdp2 (or fsdp): the model is sharded over the processes;
    megatron: the layers of Megatron-core (extra megatron; see docs/cluster.md). null means local for one process, fsdp2 for more. A
    custom backend has an import path (my_backend:MyBackend); see docs/extending.md. torchtitan is not supported yet."""
    tensor_model_parallel_size: int = number(1, low=1)
    """Ranks that share every matrix of a layer, according to the model's tensor-parallel plan. They process the same sequences;
    heads must divide."""
    pipeline_model_parallel_size: int = number(1, low=1)
    """Stages of consecutive layers, each on other ranks; micro-batches pass through them one after the other. With fsdp2 or
    megatron; with megatron the number of layers must divide."""
    ulysses_sequence_parallel_size: int = number(1, low=1)
    """Ranks that share the tokens of a micro-batch, and the heads in attention, for contexts too long for one device. The heads
    must divide."""
    context_parallel_size: int = number(1, low=1)
    """Ranks that share the tokens of a micro-batch, in attention too, where keys and values travel round the ranks (ring attention).
    Any number of heads will do. With ulysses_sequence_parallel_size both multiply. Only with strategy=fsdp2."""
    expert_parallel_size: int = number(1, low=1)
    """Ranks that share the experts of a mixture-of-experts layer; tokens are sent to their experts. It must divide the data,
    context and sequence parallel ranks."""
    fsdp_config: FsdpConfig = block(FsdpConfig)
    """Sharding and offloading."""
