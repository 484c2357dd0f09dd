"""Random-initialised Hugging Face model directories: a named architecture at a chosen number of parameters.

The shape follows one rule, so that the same request gives the same model:

1. The number of layers comes from a table.
2. The hidden size is the largest multiple of the head size (32 below 50M parameters, else 64) whose model, with a feed-forward
   width of 2.5 hidden sizes, is not larger than requested.
3. The feed-forward width is then the one that comes closest to the requested size.

Parameters are counted on modules without storage. A model that reads images has a vision tower in addition to the requested
size: half as many layers of the same width, with its processor and image marks in the tokenizer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from hone.data.chat import template_of
from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.errors import ModelError
from hone.models.registry import ARCHITECTURES, RandomInit, Shape

_PRELUDE = """\
{%- set shown = namespace(messages=[]) -%}
{%- for message in messages -%}
{%- if message.content is defined and message.content is not string and message.content is iterable -%}
{%- set text = namespace(value='') -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{%- set text.value = text.value + 'MARK' -%}
{%- elif part.text is defined -%}{%- set text.value = text.value + part.text -%}{%- endif -%}
{%- endfor -%}
{%- set shown.messages = shown.messages + [dict(message, content=text.value)] -%}
{%- else -%}
{%- set shown.messages = shown.messages + [message] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = shown.messages -%}
"""
_DECODER = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "tie_word_embeddings",
    "eos_token_id", "pad_token_id", "bos_token_id",
)  # fmt: skip
"""Settings of a decoder that do not depend on its family."""
_HEAD = 32
"""Width of an attention head of the vision tower."""


@dataclass(frozen=True)
class ImageInit:
    """Settings of the part that reads images."""

    model_type: str  # of the transformers config of the whole model
    # special tokens that are added to the tokenizer; the first one is the placeholder of an image
    marks: tuple[str, ...]
    shown: str  # text that the chat template writes for an image
    # settings of the vision tower, from its layers and width, and the decoder's width
    vision: Callable[[int, int, int], dict[str, Any]]
    # settings of the decoder's rotary positions, from half the width of its heads; empty for plain ones
    rotary: Callable[[int], dict[str, Any]]
    processor: Callable[[], Any]
    outer: Callable[[PreTrainedTokenizerBase], dict[str, Any]]  # further settings of the whole model
    # further settings of the decoder, from the config of a model of text of the same shape
    decoder: Callable[[PretrainedConfig], dict[str, Any]] = lambda config: {}

    def add_marks(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tokenizer.add_special_tokens(
            {"additional_special_tokens": list(self.marks)}, replace_extra_special_tokens=False
        )
        if tokenizer.chat_template:
            tokenizer.chat_template = _PRELUDE.replace("MARK", self.shown) + template_of(tokenizer)

    def config(self, decoder: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
        """Return the config of the whole model from that of a causal model with the decoder's shape."""
        text = {name: getattr(decoder, name) for name in _DECODER}
        layers, width = max(2, text["num_hidden_layers"] // 2), text["hidden_size"] // _HEAD * _HEAD
        rotary = self.rotary(text["head_dim"] // 2)
        return AutoConfig.for_model(
            self.model_type,
            text_config={**text, **self.decoder(decoder), **({"rope_parameters": rotary} if rotary else {})},
            # With the default, made for wide towers, the features of all images are nearly the same, and learning begins late.
            vision_config={**self.vision(layers, width, text["hidden_size"]), "initializer_range": width**-0.5},
            image_token_id=tokenizer.convert_tokens_to_ids(self.marks[0]),
            tie_word_embeddings=text["tie_word_embeddings"],
            **self.outer(tokenizer),
        )

    def save_processor(self, out: str | Path) -> None:
        self.processor().save_pretrained(out)


def _mrope(half: int, interleaved: bool) -> dict[str, Any]:
    side = half * 3 // 8
    sections = [half - 2 * side, side, side]
    return {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": sections,
        **({"mrope_interleaved": True} if interleaved else {}),
    }


def _grid_processor(patch: int) -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    side = 2 * patch
    return Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": side * side, "longest_edge": 16 * side * 16 * side}
    )


def _tile_processor() -> Any:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    return SmolVLMImageProcessorPil(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})


def _ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    names = ("vision_start", "vision_end", "video")
    marks = ("<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(mark) for name, mark in zip(names, marks, strict=True)}


_GRID_MARKS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_TILE_MARKS = (
    "<image>", "<fake_token_around_image>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip


def _gemma3_processor() -> Any:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil(size={"height": 64, "width": 64})


def _gemma4_processor() -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)


def _gemma_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the marks of Gemma by the keys of both of its configs."""
    begin, end = (tokenizer.convert_tokens_to_ids(mark) for mark in _GEMMA_MARKS[1:])
    return {"boi_token_id": begin, "eoi_token_id": end}


def _siglip(layers: int, width: int, out: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_attention_heads": width // _HEAD,
    }


_GEMMA_MARKS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")


def _grid_model(
    model_type: str, patch: int, *, interleaved: bool, more: Callable[[int], dict[str, Any]], **options: Any
) -> ImageInit:
    """Return the settings of a model of a grid; ``more`` gives those of its vision tower alone, from its layers."""

    def vision(layers: int, width: int, out: int) -> dict[str, Any]:
        sizes = {"depth": layers, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": width // _HEAD}
        return sizes | {"out_hidden_size": out, "patch_size": patch} | more(layers)

    return ImageInit(
        model_type,
        _GRID_MARKS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        vision=vision,
        processor=lambda: _grid_processor(patch),
        outer=_ids,
        **{"rotary": lambda half: _mrope(half, interleaved), **options},
    )


def _hybrid_grid_model(model_type: str) -> ImageInit:
    """Return the settings of Qwen3.5, where a quarter of a head has rotary positions."""
    return _grid_model(
        model_type,
        16,
        interleaved=True,
        more=lambda layers: {"num_position_embeddings": 256},
        rotary=lambda half: {**_mrope(half // 4, True), "partial_rotary_factor": 0.25},
        decoder=lambda config: config.to_dict(),
    )


IMAGE_MODELS = {
    "qwen2_5_vl": _grid_model(
        "qwen2_5_vl",
        14,
        interleaved=False,
        more=lambda layers: {"window_size": 112, "fullatt_block_indexes": [layers - 1]},
    ),
    "qwen3_vl": _grid_model(
        "qwen3_vl",
        16,
        interleaved=True,
        more=lambda layers: {"num_position_embeddings": 256, "deepstack_visual_indexes": list(range(layers - 1))},
    ),
    "smolvlm": ImageInit(
        "smolvlm",
        _TILE_MARKS,
        "<image>",
        vision=lambda layers, width, out: {**_siglip(layers, width, out), "image_size": 64, "patch_size": 16},
        rotary=lambda half: {},
        processor=_tile_processor,
        outer=lambda tokenizer: {"scale_factor": 2, "pad_token_id": tokenizer.pad_token_id},
        decoder=lambda config: {"model_type": "llama"},
    ),
    "qwen3_5_vl": _hybrid_grid_model("qwen3_5"),
    "qwen3_5_moe_vl": _hybrid_grid_model("qwen3_5_moe"),
    "gemma3": ImageInit(
        "gemma3",
        _GEMMA_MARKS,
        "<start_of_image>",
        vision=lambda layers, width, out: {**_siglip(layers, width, out), "image_size": 64, "patch_size": 8},
        rotary=lambda half: {},
        processor=_gemma3_processor,
        outer=lambda tokenizer: {**_gemma_ids(tokenizer), "mm_tokens_per_image": 16},
        decoder=lambda config: config.to_dict(),
    ),
    "gemma4": ImageInit(
        "gemma4",
        _GEMMA_MARKS,
        "<image_soft_token>",
        vision=lambda layers, width, out: {
            **_siglip(layers, width, out),
            "num_key_value_heads": width // _HEAD,
            "head_dim": _HEAD,
            "patch_size": 4,
            "position_embedding_size": 1024,
        },
        rotary=lambda half: {},
        processor=_gemma4_processor,
        outer=_gemma_ids,
        decoder=lambda config: {
            **config.to_dict(),
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": config.vocab_size,
        },
    ),
}
"""Models that read images, by the ``--arch`` of ``hone init``."""


TOLERANCE = 0.10
"""Largest allowed relative difference between the requested and the actual size."""

_LAYERS = ((2e6, 4), (10e6, 6), (50e6, 8), (200e6, 12), (1e9, 24))
_MOST_LAYERS = 32
_WIDTH_STEP = 16


def init_model(
    arch: str, size: str, tokenizer: str | Path, out: str | Path, *, seed: int = 0, context: int = 1024
) -> tuple[int, PretrainedConfig]:
    """Write a random-initialised model directory: config, generation config, tokenizer, chat template, safetensors.

    The vocabulary is the tokenizer's, with the marks of a model that reads images. Weights are float32 and depend on ``arch``,
    ``size``, ``seed`` and the vocabulary.

    ``size`` is the number of parameters (tied matrices once), as ``900k``, ``1m``, ``1.5m``, ``2b``; of a mixture of experts all
    count. A vision tower comes in addition. ``context`` is the longest sequence in tokens. Return the number and the config.

    Raises:
        ModelError: malformed size, no tokenizer, a size that the vocabulary does not allow, or an unwritable folder.
    """
    architecture, target = ARCHITECTURES.get(arch), parse_size(size)
    images = IMAGE_MODELS.get(arch)
    if context < 1:
        raise ModelError(f"--context {context} must be at least 1", fix="--context 1024")
    words = load_tokenizer(tokenizer)
    if images is not None:
        images.add_marks(words)
    config = find_config(architecture, target, words, context)
    factory: Any = AutoModelForCausalLM
    if images is not None:
        factory, config = AutoModelForImageTextToText, images.config(config, words)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init", arch, size))
        model = factory.from_config(config, dtype=torch.float32)
    model.generation_config = GenerationConfig(**_ends(words))
    try:
        model.save_pretrained(out)
        words.save_pretrained(out)
        if images is not None:
            images.save_processor(out)
    except OSError as error:
        raise ModelError(f"cannot write: {error}", where=str(out), fix="choose another folder with --out") from error
    return model.num_parameters(), config


def parse_size(text: str) -> int:
    """``1m`` to 1000000; also ``900k``, ``1.5M``, ``2b``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", text.strip().lower())
    count = round(float(match[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[match[2]]) if match else 0
    if count == 0:
        raise ModelError(
            f"size '{text}' is not a number of parameters", where="--size", fix="--size 1m (or 900k, 5m, 1.5b)"
        )
    return count


def find_config(
    architecture: RandomInit, target: int, tokenizer: PreTrainedTokenizerBase, context: int
) -> PretrainedConfig:
    """Find the config whose model comes closest to ``target`` parameters, by the rule of the module; ModelError beyond 10 %."""
    head = 32 if target < 50e6 else 64
    layers = next((count for limit, count in _LAYERS if target <= limit), _MOST_LAYERS)

    def size_of(hidden: int, width: int) -> int:
        return _count(_config(architecture, Shape(layers, hidden, width, head), tokenizer, context))

    def typical(units: int) -> int:
        return size_of(units * head, _round(2.5 * units * head))

    low, high = 1, 2
    while typical(high) <= target:
        low, high = high, 2 * high
    while high - low > 1:  # typical(low) <= target < typical(high), unless even the smallest is too large
        middle = (low + high) // 2
        low, high = (middle, high) if typical(middle) <= target else (low, middle)
    hidden = low * head
    at_step, at_two = size_of(hidden, _WIDTH_STEP), size_of(hidden, 2 * _WIDTH_STEP)  # the size is linear in the width
    width = max(_WIDTH_STEP, _round(_WIDTH_STEP * (1 + (target - at_step) / (at_two - at_step))))
    reached = size_of(hidden, width)
    if abs(reached - target) > TOLERANCE * target:
        raise ModelError(
            f"{architecture.model_type} with a vocabulary of {len(tokenizer):,} tokens has no shape of about "
            f"{target:,} parameters; the nearest has {reached:,}",
            why="the embedding alone takes vocabulary x hidden size parameters",
            fix=f"--size {max(1, -(-reached // 1000)):d}k, or a tokenizer with a smaller vocabulary",
        )
    return _config(architecture, Shape(layers, hidden, width, head), tokenizer, context)


def _round(width: float) -> int:
    return max(1, round(width / _WIDTH_STEP)) * _WIDTH_STEP


def _config(
    architecture: RandomInit, shape: Shape, tokenizer: PreTrainedTokenizerBase, context: int
) -> PretrainedConfig:
    settings = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_value_heads,
        "head_dim": shape.head,
        "max_position_embeddings": context,
        "tie_word_embeddings": architecture.tied,
        **_ends(tokenizer),
        **architecture.settings(shape, context),
    }
    return AutoConfig.for_model(architecture.model_type, **settings)


def _ends(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return {"eos_token_id": end, "pad_token_id": end if pad is None else pad, "bos_token_id": tokenizer.bos_token_id}


def _count(config: PretrainedConfig) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).num_parameters()
