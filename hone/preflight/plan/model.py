"""The numbers of a model that decide about memory and time, from its ``config.json`` and a count of its parameters."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config.model import ModelConfig

LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose layers Hone computes itself on a CPU (:data:`hone.generation.native.forward.LLAMA_SHAPED`)."""
_HEAD_NORMS = ("qwen3", "qwen3_moe", "gemma3_text", "olmo2")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_HEADER_LIMIT = 100 * 2**20


@dataclass(frozen=True)
class ModelShape:
    """A decoder in numbers.

    Attributes:
        kind: its ``model_type``.
        parameters: all of them, tied ones once.
        layers: how many.
        hidden: width of the residual stream.
        heads: attention heads.
        key_value_heads: heads of keys and values.
        head_dim: width of a head.
        width: inner width of the feed-forward part; of one expert where there are experts.
        vocabulary: tokens.
        tied: whether input and output embedding are one matrix.
        experts: in a layer, 0 for a dense model.
        chosen: experts that a token meets.
    """

    kind: str
    parameters: int
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    head_dim: int
    width: int
    vocabulary: int
    tied: bool
    experts: int = 0
    chosen: int = 0

    @classmethod
    def of(cls, settings: Mapping[str, Any], parameters: int) -> ModelShape | None:
        """Read ``settings``, the content of a ``config.json``; None when they are not those of a decoder."""
        numbers = [
            settings.get(key) for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
        ]
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            return None
        layers, hidden, heads, vocabulary = (int(number or 0) for number in numbers)
        experts = next((settings[key] for key in _EXPERTS if settings.get(key)), 0)
        width = (settings.get("moe_intermediate_size") if experts else None) or settings.get("intermediate_size")
        return cls(
            kind=str(settings.get("model_type", "")),
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
        )

    @property
    def llama_shaped(self) -> bool:
        """Whether Hone computes its layers itself on a CPU."""
        return self.kind in LLAMA_SHAPED

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normed."""
        return self.kind in _HEAD_NORMS

    @property
    def queries(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Width of all keys, and of all values."""
        return self.key_value_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the input embedding; the output embedding has as many."""
        return self.vocabulary * self.hidden

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        return max(0, self.parameters - self.embedding * (1 if self.tied else 2) - self.hidden) // self.layers

    @property
    def attention_matrices(self) -> int:
        """Parameters of a layer's projections to and from the heads."""
        return self.hidden * (2 * self.queries + 2 * self.keys)

    @property
    def matrices(self) -> int:
        """Parameters of a layer's projections, all experts included."""
        return self.attention_matrices + 3 * self.hidden * self.width * max(1, self.experts)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts."""
        return 3 * self.hidden * self.width * self.experts * self.layers

    @property
    def products(self) -> int:
        """Multiplications that a token takes through all matrices, the output embedding apart."""
        return self.layers * (self.attention_matrices + 3 * self.hidden * self.width * max(1, self.chosen))

    def adapter(self, rank: int) -> int:
        """Parameters of LoRA adapters of this rank on all projections."""
        ends = 2 * (self.hidden + self.queries) + 2 * (self.hidden + self.keys) + 3 * (self.hidden + self.width)
        return rank * ends * self.layers


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
