"""Random-initialised models that read images: a vision tower next to the decoder, its processor, and a tokenizer with image marks.

The decoder has the requested size; the vision tower, half as many layers of the same width, comes in addition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from hone.data.chat import template_of

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
    processor: Callable[[], Any]  # makes the image processor
    outer: Callable[[PreTrainedTokenizerBase], dict[str, Any]]  # further settings of the whole model
    decoder: dict[str, Any] = field(default_factory=dict)  # further settings of the decoder

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
            text_config={**text, **self.decoder, **({"rope_parameters": rotary} if rotary else {})},
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


def _grid_model(model_type: str, patch: int, *, interleaved: bool, more: Callable[[int], dict[str, Any]]) -> ImageInit:
    """Return the settings of a model of a grid; ``more`` gives those of its vision tower alone, from its layers."""

    def vision(layers: int, width: int, out: int) -> dict[str, Any]:
        sizes = {"depth": layers, "hidden_size": width, "intermediate_size": 2 * width, "num_heads": width // _HEAD}
        return sizes | {"out_hidden_size": out, "patch_size": patch} | more(layers)

    return ImageInit(
        model_type,
        _GRID_MARKS,
        "<|vision_start|><|image_pad|><|vision_end|>",
        vision=vision,
        rotary=lambda half: _mrope(half, interleaved),
        processor=lambda: _grid_processor(patch),
        outer=_ids,
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
        vision=lambda layers, width, out: {
            "num_hidden_layers": layers,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_attention_heads": width // _HEAD,
            "image_size": 64,
            "patch_size": 16,
        },
        rotary=lambda half: {},
        processor=_tile_processor,
        outer=lambda tokenizer: {"scale_factor": 2, "pad_token_id": tokenizer.pad_token_id},
        decoder={"model_type": "llama"},
    ),
}
"""Models that read images, by the ``--arch`` of ``hone init``."""
