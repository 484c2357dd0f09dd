"""Translation of ``rollout`` keys to the arguments of a served engine, by the engine's names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hone.config.model import ModelConfig
from hone.config.rollout import RolloutConfig, SpeculativeConfig
from hone.config.tree import RLConfig
from hone.errors import ConfigError


def engine_options(rollout: RolloutConfig, *, report_experts: bool = False) -> dict[str, Any]:
    """Return the arguments of the engine ``rollout.name``. ``engine_kwargs`` win; for None the engine has its default."""
    others = sorted(set(rollout.engine_kwargs) - {rollout.name})
    if others:
        raise ConfigError(
            f"rollout.engine_kwargs has arguments for '{others[0]}', but the engine is '{rollout.name}'",
            why="the engine would ignore them",
            fix=f"actor_rollout_ref.rollout.engine_kwargs={{{rollout.name}: {{...}}}}",
            where="actor_rollout_ref.rollout.engine_kwargs",
        )
    _check_sizes(rollout)
    check_speculation(rollout)
    devices, expert = rollout.devices_per_engine, rollout.expert_parallel_size
    if expert not in (1, devices):
        raise ConfigError(
            f"rollout.expert_parallel_size={expert}, but an engine has rollout.tensor_model_parallel_size="
            f"{rollout.tensor_model_parallel_size} x data_parallel_size={rollout.data_parallel_size} processes",
            why="engines divide experts over the same processes as the rest of the model",
            fix=f"actor_rollout_ref.rollout.expert_parallel_size={devices}, or 1",
            where="actor_rollout_ref.rollout.expert_parallel_size",
        )
    user_options = rollout.engine_kwargs.get(rollout.name) or {}
    experts = {_REPORTS_EXPERTS[rollout.name]: True} if report_experts else {}
    return _merge(_OPTIONS[rollout.name](rollout) | experts, user_options)


SPECULATES = {"native": ("ngram", "draft_model"), "vllm": ("ngram",)}
"""Methods of speculative decoding by engine."""
_SIZES = {
    "tensor_model_parallel_size": ("tensor_parallel_size", "tp_size"),
    "data_parallel_size": ("data_parallel_size", "dp_size"),
    "expert_parallel_size": ("enable_expert_parallel", "ep_size", "moe_expert_parallel_size"),
}
"""Keys of ``rollout`` that decide how many devices an engine takes, with the engines' names for them."""


def _check_sizes(rollout: RolloutConfig) -> None:
    """Check that ``engine_kwargs`` change no parallel size."""
    for key, names in _SIZES.items():
        for name in set(names) & set(rollout.engine_kwargs.get(rollout.name) or {}):
            where = f"actor_rollout_ref.rollout.engine_kwargs.{rollout.name}.{name}"
            raise ConfigError(
                f"{where} is set, but rollout.{key}={getattr(rollout, key)} says how an engine is divided",
                why="the devices of an engine are reserved by that key",
                fix=f"actor_rollout_ref.rollout.{key}={rollout.engine_kwargs[rollout.name][name]}, and remove {where}",
                where=where,
            )


def check_speculation(rollout: RolloutConfig) -> None:
    """Check that the engine drafts as configured, and that ``engine_kwargs`` do not configure it a second time."""
    block, method = "actor_rollout_ref.rollout.speculative", rollout.speculative.method
    name = {"vllm": "speculative_config", "native": "speculative"}.get(rollout.name)
    if name in (rollout.engine_kwargs.get(rollout.name) or {}):
        where = f"actor_rollout_ref.rollout.engine_kwargs.{rollout.name}.{name}"
        raise ConfigError(
            f"{where} is set, but rollout.speculative configures speculative decoding",
            why="its keys are the same for all engines",
            fix=f"{block}={{method: ngram, num_speculative_tokens: 4}}, and remove {where}",
            where=where,
        )
    if method is not None and method not in SPECULATES.get(rollout.name, ()):
        others = ", ".join(f"{engine} ({', '.join(methods)})" for engine, methods in SPECULATES.items())
        raise ConfigError(
            f"engine '{rollout.name}' has no speculative decoding with method={method}; these engines have: {others}",
            why="its log-probs of drafted tokens are not verified to be those of the policy",
            fix=f"{block}.method=null, or actor_rollout_ref.rollout.name=native",
            where=f"{block}.method",
        )


def _merge(options: dict[str, Any], user_options: dict[str, Any]) -> dict[str, Any]:
    """Return Hone's arguments overridden by the user's; dictionaries are merged key by key."""
    both = [
        name for name, value in user_options.items() if isinstance(value, dict) and isinstance(options.get(name), dict)
    ]
    return {**options, **user_options, **{name: {**options[name], **user_options[name]} for name in both}}


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _vllm(rollout: RolloutConfig) -> dict[str, Any]:
    return _without_none(
        tensor_parallel_size=rollout.tensor_model_parallel_size,
        data_parallel_size=None if rollout.data_parallel_size == 1 else rollout.data_parallel_size,
        enable_expert_parallel=rollout.expert_parallel_size > 1 or None,
        gpu_memory_utilization=rollout.gpu_memory_utilization,
        enable_prefix_caching=rollout.enable_prefix_caching,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        enforce_eager=rollout.enforce_eager,
        enable_chunked_prefill=rollout.enable_chunked_prefill,
        speculative_config=_drafts_of_vllm(rollout.speculative),
    )


def _drafts_of_vllm(settings: SpeculativeConfig) -> dict[str, Any] | None:
    """Return vLLM's ``speculative_config``; its keys have the same names."""
    if settings.method is None:
        return None
    names = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
    return {name: getattr(settings, name) for name in names}


def _sglang(rollout: RolloutConfig) -> dict[str, Any]:
    """Return SGLang's arguments; -1 as the size of prefill chunks disables chunking."""
    chunk_size = rollout.max_num_batched_tokens if rollout.enable_chunked_prefill in (None, True) else -1
    copies, shares_experts = rollout.data_parallel_size, rollout.expert_parallel_size > 1
    return _without_none(
        # with shared experts, the copies divide only the attention of one tensor-parallel model
        tp_size=rollout.devices_per_engine if shares_experts else rollout.tensor_model_parallel_size,
        dp_size=copies if copies > 1 else None,
        enable_dp_attention=True if copies > 1 and shares_experts else None,
        ep_size=rollout.expert_parallel_size if rollout.expert_parallel_size > 1 else None,
        mem_fraction_static=rollout.gpu_memory_utilization,
        disable_radix_cache=not rollout.enable_prefix_caching,
        max_prefill_tokens=rollout.max_num_batched_tokens,
        chunked_prefill_size=chunk_size,
        disable_cuda_graph=rollout.enforce_eager,
    )


def _trtllm(rollout: RolloutConfig) -> dict[str, Any]:
    """Return TensorRT-LLM's arguments; its memory fraction counts free memory, and a null disables CUDA graphs."""
    if rollout.data_parallel_size > 1:
        raise ConfigError(
            f"rollout.data_parallel_size={rollout.data_parallel_size}, but TensorRT-LLM has one copy of the model",
            why="its engine distributes requests over no copies",
            fix="actor_rollout_ref.rollout.data_parallel_size=1, and more replicas: rollout.num_replicas",
            where="actor_rollout_ref.rollout.data_parallel_size",
        )
    return {
        **_without_none(
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            moe_expert_parallel_size=rollout.expert_parallel_size if rollout.expert_parallel_size > 1 else None,
            max_num_tokens=rollout.max_num_batched_tokens,
            enable_chunked_prefill=rollout.enable_chunked_prefill,
        ),
        **({"cuda_graph_config": None} if rollout.enforce_eager else {}),
        "kv_cache_config": {
            "free_gpu_memory_fraction": rollout.gpu_memory_utilization,
            "enable_block_reuse": rollout.enable_prefix_caching,
        },
    }


def _native(rollout: RolloutConfig) -> dict[str, Any]:
    speculative = asdict(rollout.speculative) if rollout.speculative.method is not None else None
    return _without_none(gpu_memory_utilization=rollout.gpu_memory_utilization, speculative=speculative)


_REPORTS_EXPERTS = {
    "native": "report_experts",
    "vllm": "enable_return_routed_experts",
    "sglang": "enable_return_routed_experts",
}
"""Argument of each engine of :data:`hone.config.limits.REPORT_EXPERTS` that lets completions have the experts of each token."""
_OPTIONS: dict[str, Callable[[RolloutConfig], dict[str, Any]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "native": _native,
}


def has_adapter(config: RLConfig) -> bool:
    shared = config.actor_rollout_ref.model
    return shared.lora_rank > 0 or shared.lora_adapter_path is not None


def sends_adapter(config: RLConfig) -> bool:
    """Return whether a weight sync sends only the adapter, unmerged (``rollout.merge_lora=false``)."""
    return not config.actor_rollout_ref.rollout.merge_lora and has_adapter(config)


def needs_untied_head(config: RLConfig) -> bool:
    """Return whether an engine with a copy of the weights needs an output embedding of its own, though the model's are tied."""
    from hone.models.tied import will_part_embeddings

    rollout = config.actor_rollout_ref.rollout
    if not has_adapter(config) or not will_part_embeddings(config.actor_rollout_ref.model):
        return False
    if rollout.name not in ("native", "hf") or rollout.engine_url is not None:
        raise ConfigError(
            f"the adapter changes one of two tied embeddings, which engine '{rollout.name}' holds as one matrix",
            why="the engine would sample from another policy than the trained one",
            fix="actor_rollout_ref.rollout.name=native without engine_url, or an adapter without lm_head and embed_tokens: "
            "actor_rollout_ref.model.target_modules=all-linear",
            where="actor_rollout_ref.model.target_modules",
        )
    return True


def adapter_shape(config: RLConfig) -> dict[str, float] | None:
    """Return rank and scale of the adapter that the engine loads; None for whole weights."""
    rollout = config.actor_rollout_ref.rollout
    if not sends_adapter(config):
        return None
    if rollout.name != "vllm" or rollout.engine_url is not None:
        raise ConfigError(
            f"engine '{rollout.name}'{' at engine_url' if rollout.engine_url else ''} takes no adapters, but rollout.merge_lora=false",
            why="only a vLLM started by the run computes with an unmerged adapter",
            fix="actor_rollout_ref.rollout.merge_lora=true",
            where="actor_rollout_ref.rollout.merge_lora",
        )
    return _shape(config.actor_rollout_ref.model)


def _shape(model: ModelConfig) -> dict[str, float]:
    if model.lora_adapter_path is None:
        return {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
    file = Path(model.lora_adapter_path, "adapter_config.json")
    if not file.is_file():
        raise ConfigError(
            f"'{model.lora_adapter_path}' is not an adapter: {file.name} is missing",
            fix="actor_rollout_ref.model.lora_adapter_path=DIR of a PEFT adapter",
            where="actor_rollout_ref.model.lora_adapter_path",
        )
    saved = json.loads(file.read_text())
    unusual = [name for name in ("use_rslora", "rank_pattern", "alpha_pattern") if saved.get(name)]
    if unusual:
        raise ConfigError(
            f"the adapter in '{model.lora_adapter_path}' has {unusual[0]}",
            why="its scale is not lora_alpha / r, which the engine assumes",
            fix="actor_rollout_ref.rollout.merge_lora=true",
            where="actor_rollout_ref.rollout.merge_lora",
        )
    return {"r": saved["r"], "lora_alpha": saved["lora_alpha"]}
