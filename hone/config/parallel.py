"""How a model is divided over the processes of its group: keys of ``actor_rollout_ref.actor`` and ``.ref``."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.fields import block, choice, number


@dataclass
class MixedPrecisionConfig:
    """Dtypes of FSDP's communication."""

    param_dtype: str | None = choice(None, "float32", "bfloat16")
    """Dtype in which parameters are gathered and computed with; null means actor.dtype. The shards stay float32."""
    reduce_dtype: str = choice("float32", "float32", "bfloat16")
    """Dtype in which gradients are summed over ranks."""


@dataclass
class FsdpConfig:
    """Fully sharded data parallel: where the pieces of parameters, gradients and optimizer state are."""

    fsdp_size: int = -1
    """Ranks that one copy of the parameters is cut over; -1 means all. Fewer makes copies (hybrid sharding): gradients are
    summed within a copy first, then between copies, which suits nodes with a slow network between them."""
    reshard_after_forward: bool = True
    """Free a layer's gathered parameters after its forward pass and gather them again in the backward pass: less memory,
    half as much communication again."""
    offload_policy: bool = False
    """Keep shards of parameters, gradients and optimizer state in the host's memory, always, and update there. The last
    resort when memory is short: each layer is copied to the device when its turn comes."""
    param_offload: bool = False
    """Keep the parameters' shards in the host's memory while the model is not in use; they are on the device during
    passes and updates."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in the host's memory except during its own step."""
    mixed_precision: MixedPrecisionConfig = block(MixedPrecisionConfig)
    """Dtypes of communication."""


@dataclass
class ParallelConfig:
    """The strategy and the sizes of each way to divide the work. Their product divides the number of processes; what is
    left over is data parallel."""

    strategy: str | None = choice(None, "local", "fsdp2", "fsdp", "megatron", "torchtitan")
    """What holds the model. local: each process all of it, so there may be only one; fsdp2 (fsdp is its other name): shards
    over the processes. null means local for one process, fsdp2 for more. megatron and torchtitan are refused: not
    supported yet."""
    tensor_model_parallel_size: int = number(1, low=1)
    """Ranks that share every matrix of a layer, by the model's own plan. They see the same sequences; heads must divide."""
    ulysses_sequence_parallel_size: int = number(1, low=1)
    """Ranks that share the tokens of a micro-batch, and the heads in attention: for contexts too long for one device."""
    expert_parallel_size: int = number(1, low=1)
    """Ranks that share the experts of a mixture-of-experts layer; tokens travel to their experts. It is taken from the
    data and sequence parallel ranks, which it must divide."""
    fsdp_config: FsdpConfig = block(FsdpConfig)
    """Sharding and offloading."""
