"""Random-initialised Hugging Face model directories: a named architecture at a chosen number of parameters.

The shape follows one rule, so that the same request gives the same model:

1. The number of layers comes from a table.
2. The hidden size is the largest multiple of the head size (32 below 50M parameters, else 64) whose model, with a feed-forward
   width of 2.5 hidden sizes, is not larger than requested.
3. The feed-forward width is then the one that comes closest to the requested size.

Parameters are counted on modules without storage.
"""

from __future__ import annotations

import re
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

from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.errors import ModelError
from hone.models.image_init import IMAGE_MODELS
from hone.models.registry import ARCHITECTURES, RandomInit, Shape

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
