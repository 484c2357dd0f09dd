"""Models and settings that the backend supports; readable before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hone.config.model import ModelConfig, OptimConfig, SFTModelConfig
from hone.config.parallel import ParallelConfig
from hone.errors import ConfigError, ModelError

NAME = "megatron"
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")  # values of ``model_type`` whose weights the backend can map
OPTIMIZERS = ("Adam", "AdamW")  # optimizers that Megatron's distributed optimizer shards
_ROPE = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Obstacle:
    """A setting that the backend does not support."""

    key: str  # below its block
    value: Any
    reason: str
    supported: str  # a value that is


def require_model(settings: Mapping[str, Any], parallel: ParallelConfig, path: str | None) -> None:
    """Raise ModelError unless Megatron-core computes the model of a ``config.json`` with these parallel sizes."""
    if obstacles := [*model_obstacles(settings), *size_obstacles(settings, parallel)]:
        key = parallel.key("strategy")
        raise ModelError(
            f"strategy={NAME} does not support the model '{path}': {'; '.join(obstacles)}",
            why="Megatron-core would compute another model, or cannot divide this one",
            where=key,
            fix=f"{key}=fsdp2",
        )


def require_settings(model: ModelConfig, optim: OptimConfig | None, parallel: ParallelConfig) -> None:
    """Raise ConfigError for a setting of a model that is not supported."""
    obstacles = [("model", obstacle) for obstacle in model_setting_obstacles(model)]
    if optim is not None:
        obstacles += [("optim", obstacle) for obstacle in optimizer_obstacles(optim)]
    obstacles += [(parallel.block_path, obstacle) for obstacle in parallel_obstacles(parallel)]
    for block, obstacle in obstacles:
        raise setting_error(block, obstacle, parallel.key("strategy"))


def setting_error(block: str, obstacle: Obstacle, strategy: str) -> ConfigError:
    """Return the error about a setting below ``block``; ``strategy`` is the key of the training backend."""
    key = f"{block}.{obstacle.key}" if block else obstacle.key
    return ConfigError(
        f"strategy={NAME} does not support {key}={obstacle.value}",
        why=obstacle.reason,
        where=key,
        fix=f"{key}={obstacle.supported}, or {strategy}=fsdp2",
    )


def model_obstacles(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what Megatron-core would compute differently. Missing keys of the ``config.json`` have transformers'
    defaults.
    """
    family = settings.get("model_type")
    if family not in FAMILIES:
        yield f"weights of model_type '{family}' have no mapping (supported: {', '.join(FAMILIES)})"
        return
    if settings.get("hidden_act", "silu") != "silu":
        yield f"hidden_act={settings['hidden_act']} (supported: silu)"
    if settings.get("attention_bias") or settings.get("mlp_bias"):
        yield "biases in the projections of attention or MLP (supported: those of Qwen2's queries, keys and values)"
    if settings.get("use_sliding_window") or set(settings.get("layer_types") or ()) - {"full_attention"}:
        yield "layers with a sliding window"
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE:
        yield f"rope_type={kind} (supported: {', '.join(_ROPE)})"
    if family == "qwen3_moe" and (settings.get("mlp_only_layers") or settings.get("decoder_sparse_step", 1) != 1):
        yield "some layers without experts"


def size_obstacles(settings: Mapping[str, Any], parallel: ParallelConfig) -> Iterator[str]:
    """Yield which sizes of a model the parallel sizes do not divide; heads and experts have rules of their own."""
    tensor, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    divisors = {"vocab_size": tensor, "intermediate_size": tensor, "num_hidden_layers": stages}
    for key, ranks in divisors.items():
        if (size := settings.get(key)) and size % ranks:
            yield f"{key}={size} does not divide by {ranks}"
    if tensor > 1 and settings.get("model_type") == "qwen3_moe":
        yield "experts with tensor parallelism, which Megatron-core trains only with sequence parallelism"


def model_setting_obstacles(model: ModelConfig) -> Iterator[Obstacle]:
    """Yield unsupported settings of a model block."""
    if model.lora_rank > 0:
        yield Obstacle("lora_rank", model.lora_rank, "PEFT adapts modules of transformers", "0")
    if model.lora_adapter_path:
        yield Obstacle("lora_adapter_path", model.lora_adapter_path, "PEFT adapts modules of transformers", "null")
    if model.tiled_mlp.enabled:
        yield Obstacle("tiled_mlp.enabled", "true", "it replaces modules of transformers", "false")
    if isinstance(model, SFTModelConfig) and model.dropout:
        yield Obstacle("dropout", "true", "its layers are built without", "false")


def optimizer_obstacles(optim: OptimConfig) -> Iterator[Obstacle]:
    if optim.optimizer not in OPTIMIZERS:
        yield Obstacle("optimizer", optim.optimizer, "Megatron's distributed optimizer shards Adam and AdamW", "AdamW")
    if optim.ema_decay is not None:
        yield Obstacle("ema_decay", optim.ema_decay, "the average of a shard cannot be saved", "null")


def parallel_obstacles(parallel: ParallelConfig) -> Iterator[Obstacle]:
    """Yield unsupported settings of the block with the training backend."""
    fsdp = parallel.fsdp_config
    for key in ("ulysses_sequence_parallel_size", "context_parallel_size"):
        if (size := getattr(parallel, key)) > 1:
            reason = "context and sequence parallelism of Megatron-core need Transformer Engine, which is not used"
            yield Obstacle(key, size, reason, "1")
    defaults = {"fsdp_size": -1, "offload_policy": False, "param_offload": False, "optimizer_offload": False}
    for key, default in defaults.items():
        if (value := getattr(fsdp, key)) != default:
            yield Obstacle(f"fsdp_config.{key}", str(value).lower(), "it is a setting of FSDP", str(default).lower())
    precision = fsdp.mixed_precision
    if precision.param_dtype is not None:
        key, value = "fsdp_config.mixed_precision.param_dtype", precision.param_dtype
        yield Obstacle(key, value, "it is a setting of FSDP", "null")
    if precision.reduce_dtype != "float32":
        key, value = "fsdp_config.mixed_precision.reduce_dtype", precision.reduce_dtype
        yield Obstacle(key, value, "gradients are summed in float32", "float32")
