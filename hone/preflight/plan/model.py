"""The sizes of a model that decide about memory and time, and what its passes hold, in closed form.

Sizes come from ``config.json`` and a count of the parameters. The coefficients of activations were read off the tensors that
autograd keeps (``saved_tensors_hooks``) in models that differ in one width at a time; a test repeats that for every row of the
table. ``hone plan --measure`` replaces the estimate for the model at hand by one measured micro-batch
(:mod:`hone.preflight.plan.devices`): ``scale`` is the measurement divided by the estimate.
"""

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

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
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
        settings = _with_usual_names(settings)
        if not all(isinstance(settings.get(key), int) and settings[key] > 0 for key in SIZES):
            return None
        layers, hidden, heads, vocabulary = (settings[key] for key in SIZES)
        experts = next((settings[key] for key in EXPERTS if settings.get(key)), 0)
        width = (settings.get("moe_intermediate_size") if experts else None) or settings.get("intermediate_size")
        width = max(width) if isinstance(width, list) else width  # Gemma 3n has one for each layer
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


def _with_usual_names(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return settings with the sizes that the family calls otherwise, as GPT-2 has ``n_embd``, also under their usual names."""
    from transformers import CONFIG_MAPPING

    kind = str(settings.get("model_type"))
    if kind not in CONFIG_MAPPING or all(key in settings for key in SIZES):
        return settings
    family, renamed = CONFIG_MAPPING[kind], dict(settings)
    renamed.setdefault("tie_word_embeddings", getattr(family, "tie_word_embeddings", False))
    return renamed | {usual: settings[name] for usual, name in family.attribute_map.items() if name in settings}


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
    if "quantization_config" in read_model(model.path):
        return _count_from_config(model)
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


LOGIT_ROWS = 2048  # rows of logits that exist at a time (:func:`hone.algorithms.logits.chunked_log_probs`)

_KEPT = {
    # (executor, bfloat16): bytes per number of (hidden, queries, keys, feed-forward width), more with query and key norms
    ("llama", False): (16, 8, 8, 16, 0),
    ("llama", True): (14, 4, 4, 8, 0),
    ("cuda", False): (16, 4, 8, 12, 0),
    ("cuda", True): (12, 2, 4, 6, 0),
    ("module", False): (24, 4, 0, 16, 8),
    ("module", True): (26, 2, 0, 8, 6),
    ("adapters", False): (16, 4, 0, 16, 4),
    ("adapters", True): (18, 2, 0, 8, 4),
}
"""What a layer keeps per token until its backward pass, without the inputs of attention."""


@dataclass(frozen=True)
class Passes:
    """The passes of a model on one device, and what they hold in bytes."""

    shape: ModelShape
    on_cpu: bool
    bf16: bool
    tokens: float = 0.0  # tokens in the matmuls of the largest micro-batch, this rank's share
    responses: float = 0.0  # those whose log-prob is computed
    # whether no matmul copies its weight: FSDP gathers parameters in bfloat16, or frozen ones are held so
    gathered: bool = False
    divided: bool = False
    lora_rank: int = 0
    checkpointing: bool = False
    keeps_attention: bool = False
    tiles: int = 1  # chunks of the feed-forward part, 1 without tiling
    tensor: int = 1  # ranks that share every matrix
    on_host: bool = False  # whether kept activations go to the host's memory
    # tokens in attention per token in the matmuls: on a GPU each response brings its prompt along
    prompt_copies: float = 1.0
    scale: float = 1.0
    ring: int = 1  # ranks of ring attention
    packed: bool = False  # whether packed matrices are unpacked one at a time

    @property
    def executor(self) -> str:
        """Name of the code that computes the layers: an executor of :mod:`hone.models.llama`, the model's own module, or adapters."""
        if self.lora_rank:
            return "adapters"
        plain = not (self.divided or self.gathered) and self.tensor == 1
        if not plain or not family_of(self.shape.kind).llama_shaped:
            return "module"
        return "llama" if self.on_cpu else "cuda"

    @property
    def number(self) -> int:
        return 2 if self.bf16 else 4

    # per token -------------------------------------------------------------------------------------------------------

    @property
    def layer_kept(self) -> float:
        """Bytes that one layer keeps of a token until its backward pass."""
        if not self.checkpointing:
            return self._layer
        shape = self.shape
        # an output, and the float32 logarithm of each head's sum; on a CPU attention is not kept
        attention = (self.number * shape.queries + 4 * shape.heads) / self.tensor
        added = self.number * (self.executor == "cuda")  # the fused layer adds the last output itself
        return (4 + added) * shape.hidden + attention * (self.keeps_attention and not self.on_cpu)

    @property
    def _layer(self) -> float:
        hidden, queries, keys, width, norms = _KEPT[self.executor, self.bf16]
        shape, norms = self.shape, norms * family_of(self.shape.kind).qk_norm
        heads = (queries + norms) * shape.queries + (keys + norms) * shape.keys
        if self.on_cpu:
            heads += 4 * (shape.queries + shape.keys) + self.number * shape.keys
            heads += 4 * shape.queries * (self.ring > 1)  # a ring keeps the output too
        else:  # the kernel keeps its inputs and its output; in float32 queries of prompts are computed for each response
            queries_copied = 1.0 if self.bf16 else self.prompt_copies
            heads += 2 * self.number * (queries_copied * shape.queries + self.prompt_copies * shape.keys)
        return self.scale * (hidden * shape.hidden + heads / self.tensor + width * self._width * (self.tiles == 1))

    @property
    def outside_kept(self) -> float:
        """Bytes that the embedding, the rotations and the final norm keep of a token."""
        return 4 * ((2 if self.executor == "module" else 1) * self.shape.hidden + 2 * self.shape.head_dim)

    @property
    def forward_peak(self) -> float:
        """Bytes of a token in a forward pass that keeps nothing: in attention, or in the feed-forward part."""
        shape, number = self.shape, self.number
        projected = (number + 4) * shape.queries + (3 * number + 4) * shape.keys
        attended = 4 * (shape.queries + shape.keys) * (4 if self.on_cpu else number) * self.prompt_copies
        # of a ring: float32 sums of the parts, the blocks that come and go, and keys and values in the order of the queries
        ring = (8 * shape.queries + 8 * number * shape.keys) * (self.ring > 1)
        return 8 * shape.hidden + max(
            (projected + attended + ring) / self.tensor, 3 * self._width * number / self.tiles
        )

    @property
    def backward_peak(self) -> float:
        """Bytes of a token in the backward pass of a feed-forward part, or of ring attention, besides what was kept."""
        tile = (3 if self.tiles == 1 else 7 / self.tiles) * self._width * self.number
        # gradients in float32: of the queries, and of keys and values once added, once sent and once received
        ring = (8 * self.shape.queries + (24 + 8 * self.number) * self.shape.keys) / self.tensor * (self.ring > 1)
        return max(tile, ring) + 8 * self.shape.hidden + (self._layer if self.checkpointing else 0)

    @property
    def _width(self) -> float:
        return self.shape.width * max(1, self.shape.chosen) / self.tensor

    # in all ----------------------------------------------------------------------------------------------------------

    @property
    def weight_copies(self) -> float:
        """Copies of weights: autocast's in bfloat16, the Llama executors' joint projections in float32, one unpacked matrix."""
        shape = self.shape
        if self.packed:
            return shape.hidden * max(shape.width, shape.queries) * self.number
        if self.bf16:
            return 0 if self.gathered else shape.layers * 2 * shape.matrices / self.tensor
        joint = {"llama": shape.queries + 2 * shape.keys, "cuda": shape.queries + 2 * shape.keys + 2 * shape.width}
        return shape.layers * 4 * shape.hidden * joint.get(self.executor, 0)

    @property
    def log_probs_kept(self) -> float:
        """Bytes that the log-probs of response tokens keep, and autocast's copy of the output embedding."""
        copy = 2 * self.shape.embedding / self.tensor * self.bf16
        return self.responses * (self.shape.hidden * self.number + 24) + copy

    @property
    def logits(self) -> float:
        """One chunk of logits, in two float32 copies and autocast's."""
        return min(self.responses, LOGIT_ROWS) * self.shape.vocabulary / self.tensor * (10 if self.bf16 else 8)

    @property
    def logits_backward(self) -> float:
        """One chunk of logits, with the gradients of the hidden states and the output embedding."""
        gradient = self.shape.embedding / self.tensor * (6 if self.bf16 else 4) * (not self.lora_rank)
        return self.logits + self.responses * self.shape.hidden * self.number + gradient
