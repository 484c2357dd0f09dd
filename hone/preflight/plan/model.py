"""The sizes of a model that decide about memory and time, from its ``config.json`` and a count of its parameters."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config.model import ModelConfig
from hone.data.model_settings import decoder_settings
from hone.models.registry import TOWERS, CacheSize, family_of, tensor_plan_of
from hone.preflight.reading import read_model

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder."""

    kind: str
    parameters: int  # all of them, tied ones once
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    width: int  # inner width of the feed-forward part; of one expert where there are experts
    vocabulary: int
    tied: bool
    experts: int = 0  # of a layer; 0 for a dense model
    chosen: int = 0  # experts that compute a token
    cache: CacheSize = CacheSize(0)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], parameters: int) -> ModelShape | None:
        """Read the content of a ``config.json``; None when it does not describe a decoder."""
        keys = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        if not all(isinstance(settings.get(key), int) and settings[key] > 0 for key in keys):
            return None
        layers, hidden, heads, vocabulary = (settings[key] for key in keys)
        experts = next((settings[key] for key in _EXPERTS if settings.get(key)), 0)
        width = (settings.get("moe_intermediate_size") if experts else None) or settings.get("intermediate_size")
        kind = str(settings.get("model_type", ""))
        return cls(
            kind=kind,
            parameters=parameters,
            layers=layers,
            hidden=hidden,
            heads=heads,
            key_value_heads=settings.get("num_key_value_heads") or heads,
            head_dim=settings.get("head_dim") or hidden // heads,
            width=width or 4 * hidden,
            vocabulary=vocabulary,
            tied=bool(settings.get("tie_word_embeddings", False)),
            experts=experts,
            chosen=settings.get("num_experts_per_tok") or 0,
            cache=family_of(kind).cache_size(settings),
        )

    @property
    def queries(self) -> int:
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.key_value_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding; the output embedding has the same number."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        return max(0, self.parameters - self.embedding * (1 if self.tied else 2) - self.hidden) // self.layers

    @property
    def matrices(self) -> int:
        """Parameters of a layer's projections, all experts included."""
        return self._matrices(self.experts)

    @property
    def multiplications(self) -> int:
        """Multiplications per token in all layers' matrices, without the output embedding."""
        return self.layers * self._matrices(self.chosen)

    def _matrices(self, experts: int) -> int:
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.width * max(1, experts))

    def adapter(self, rank: int) -> int:
        ends = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys) + 3 * (self.hidden + self.width)
        return rank * ends * self.layers


def shape_of(model: ModelConfig, parameters: int | None = None) -> ModelShape | None:
    """Return the shape of a model directory; None when its config.json does not describe a decoder. ``parameters``: of
    the model; None counts them.
    """
    settings = read_model(model.path)
    counted = (parameters or count_parameters(model)) if settings else None
    return (
        ModelShape.from_settings(decoder_settings({**settings, **model.override_config}), counted) if counted else None
    )


def count_parameters(model: ModelConfig) -> int | None:
    """Return the parameters of a model directory, from the headers of its weight files or from its config.json.

    None where neither says. Tied weights that the files leave out are counted once.
    """
    directory = Path(model.path or "")
    try:
        counts = [sum(_tensor_sizes(file)) for file in directory.glob("*.safetensors")]
    except (OSError, ValueError, struct.error):
        counts = []
    if counts:
        return sum(counts) or None
    return _count_from_config(model) if (directory / "config.json").is_file() else None


def frozen_parameters(model: ModelConfig) -> int:
    """Return the parameters of a vision tower that is not trained, from the headers of the weight files; 0 where they do not say."""
    if not model.freeze_vision_tower:
        return 0
    try:
        files = list(Path(model.path or "").glob("*.safetensors"))
        return sum(sum(_tensor_sizes(file, part=TOWERS)) for file in files)
    except (OSError, ValueError, struct.error):
        return 0


def _tensor_sizes(file: Path, part: Sequence[str] = ()) -> Iterator[int]:
    """Yield the parameters of each tensor of a safetensors file, from its header; with ``part`` of modules of these names alone."""
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(min(size, _HEADER_LIMIT)))
    for name, tensor in header.items():
        if name != "__metadata__" and (not part or any(module in part for module in name.split("."))):
            yield math.prod(tensor["shape"])


def _count_from_config(model: ModelConfig) -> int | None:
    """Count on modules without storage; None for a configuration that transformers refuses (rule R08 reports it)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(str(model.path), local_files_only=True, **model.override_config)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(settings, dtype=torch.float32).num_parameters()
    except (ValueError, KeyError, OSError, ImportError, AttributeError, TypeError):
        return None


def has_tensor_plan(model_type: str) -> bool:
    """Return whether the family or transformers has a tensor-parallel plan; true for a type neither knows (remote code)."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return True
    kind = CONFIG_MAPPING[model_type]
    inner = getattr(kind, "sub_configs", {}).get("text_config", kind)
    return bool(tensor_plan_of(model_type, inner) or tensor_plan_of(model_type, kind))
