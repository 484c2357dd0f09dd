"""How much memory the models of a run need at least, from files alone: parameters are counted, nothing is loaded."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hone.catalogue.memory import FROZEN_BYTES, TRAINED_BYTES
from hone.config.model import ModelConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.preflight.evidence import Evidence, model_block
from hone.preflight.needs import needs_critic, needs_reference

_HEADER_LIMIT = 100 * 2**20
_KEY_AND_VALUE = 2


@dataclass(frozen=True)
class Part:
    """Something that takes memory throughout a run, in bytes."""

    name: str
    size: float


def count_parameters(model: ModelConfig) -> int | None:
    """Return the parameters of a model directory: from the heads of its weight files, else from its config.json.

    None where neither tells. Tied weights that the files leave out are counted once.
    """
    directory = Path(model.path or "")
    files = sorted(directory.glob("*.safetensors"))
    counts = [_in_file(file) for file in files]
    if files and all(count is not None for count in counts):
        return sum(count for count in counts if count is not None) or None
    return _from_config(model) if (directory / "config.json").is_file() else None


def resident(config: AnyConfig, evidence: Evidence) -> list[Part]:
    """Return what lies in memory throughout a run, before activations: models, gradients, optimizer, key-value cache.

    Empty when the parameters are not known. A critic and a reference with another model are taken to be of the same size.
    """
    parameters = evidence.parameters
    if parameters is None:
        return []
    model = model_block(config)[1]
    lora = model.lora_rank > 0 or model.lora_adapter_path is not None
    trained = FROZEN_BYTES if lora else TRAINED_BYTES
    parts = [Part("base weights" if lora else "weights, gradients and AdamW of the policy", parameters * trained)]
    if isinstance(config, RLConfig):
        if needs_reference(config) and not lora:
            parts.append(Part("reference", parameters * FROZEN_BYTES))
        if needs_critic(config):
            parts.append(Part("weights, gradients and AdamW of the critic", parameters * TRAINED_BYTES))
        parts.append(Part("key-value cache", _cache(config, evidence)))
    return [part for part in parts if part.size]


def checkpoint_size(config: AnyConfig, evidence: Evidence) -> float | None:
    """Return the bytes of one checkpoint (float32 weights and two AdamW moments of what is trained), None if not known."""
    parameters, model = evidence.parameters, model_block(config)[1]
    if parameters is None:
        return None
    if model.lora_rank > 0 or model.lora_adapter_path is not None:
        from hone.catalogue.memory import ADAPTER_SHARE

        return 12 * ADAPTER_SHARE * parameters
    critic = isinstance(config, RLConfig) and needs_critic(config)
    return 12 * parameters * (2 if critic else 1)


def _cache(config: RLConfig, evidence: Evidence) -> float:
    settings, rollout = evidence.model_settings, config.actor_rollout_ref.rollout
    heads = settings.get("num_attention_heads")
    layers, hidden = settings.get("num_hidden_layers"), settings.get("hidden_size")
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int) and heads):
        return 0
    shared = settings.get("num_key_value_heads") or heads
    width = settings.get("head_dim") or hidden // heads
    sequences = min(rollout.max_num_seqs, config.data.train_batch_size * rollout.n)
    longest = config.data.max_prompt_length + config.data.max_response_length
    tokens = rollout.max_cache_tokens or sequences * longest
    half = "bfloat16" in (rollout.dtype, config.actor_rollout_ref.actor.dtype if rollout.dtype == "auto" else "")
    return tokens * layers * shared * width * _KEY_AND_VALUE * (2 if half else 4)


def _in_file(file: Path) -> int | None:
    """Parameters of a safetensors file, read from its head; None when it has none that can be read."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            if size > _HEADER_LIMIT:
                return None
            head = json.loads(stream.read(size))
    except (OSError, ValueError, struct.error):
        return None
    return sum(_sizes(head))


def _sizes(head: dict[str, dict[str, list[int]]]) -> Iterator[int]:
    for name, tensor in head.items():
        if name != "__metadata__":
            yield math.prod(tensor["shape"])


def _from_config(model: ModelConfig) -> int | None:
    """Count on modules without storage; None for a configuration that transformers does not take, which R08 tells."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(str(model.path), local_files_only=True, **model.override_config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).num_parameters()
    except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError):
        return None
