"""A model with random weights as an ordinary Hugging Face directory: named architecture, any small size."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hone.data.seeding import derive_seed
from hone.data.tokenizer import load_tokenizer
from hone.errors import ConfigError
from hone.registry import Registry

Shape = dict[str, Any]

ARCHITECTURES: Registry[Callable[[Shape], PreTrainedConfig]] = Registry("architecture", key="--arch")
"""Names to functions that turn a common shape into a transformers configuration."""


def _register(name: str, model_type: str, **extra: Any) -> None:
    def build(shape: Shape) -> PreTrainedConfig:
        return CONFIG_MAPPING[model_type](**{**shape, **extra})

    ARCHITECTURES.register(name)(build)


def _register_mixture(name: str, model_type: str, experts: int, **extra: Any) -> None:
    def build(shape: Shape) -> PreTrainedConfig:
        intermediate = max(8, shape["intermediate_size"] // 2)
        mixture = {"num_experts": experts, "num_local_experts": experts, "num_experts_per_tok": 2}
        return CONFIG_MAPPING[model_type](
            **{**shape, "intermediate_size": intermediate, "moe_intermediate_size": intermediate, **mixture, **extra}
        )

    ARCHITECTURES.register(name)(build)


for _name in ("qwen3", "qwen2", "llama", "mistral", "phi3", "granite", "olmo2"):
    _register(_name, _name)
_register("gemma2", "gemma2", sliding_window=512)
_register("gemma3", "gemma3_text", sliding_window=512)
_register_mixture("qwen3_moe", "qwen3_moe", experts=4, decoder_sparse_step=1)
_register_mixture("mixtral", "mixtral", experts=4)
_register_mixture("gpt_oss", "gpt_oss", experts=4, sliding_window=128)


def parse_size(text: str) -> int:
    """``"1m"`` to 1,000,000; suffixes k, m, b.

    Raises:
        ConfigError: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb])", text.strip().lower())
    if not match:
        raise ConfigError(f"'{text}' is not a model size", where="--size", fix="--size 1m (suffixes k, m, b)")
    return int(float(match[1]) * {"k": 1e3, "m": 1e6, "b": 1e9}[match[2]])


def choose_config(arch: str, size: int, tokenizer: PreTrainedTokenizerBase, context: int) -> PreTrainedConfig:
    """The configuration of ``arch`` whose parameter count is nearest to ``size`` for this vocabulary.

    Depth grows with width (one layer for every 32 of hidden size, at least 2); then the feed-forward width takes up the rest.

    Raises:
        ConfigError: unknown architecture, or the vocabulary alone is larger than the size.
    """
    build = ARCHITECTURES.get(arch)

    def config_of(hidden: int, intermediate: int) -> PreTrainedConfig:
        return build(_shape(hidden, intermediate, tokenizer, context))

    widths = [*range(32, 256, 32), *range(256, 8193, 64)]
    low, high = 0, len(widths) - 1
    while low < high:  # the widest that still fits with a narrow feed-forward
        middle = (low + high + 1) // 2
        if _count(config_of(widths[middle], widths[middle] * 3 // 2)) <= size:
            low = middle
        else:
            high = middle - 1
    hidden = widths[low]
    narrow, wide = _count(config_of(hidden, hidden)), _count(config_of(hidden, 2 * hidden))
    per_unit = (wide - narrow) / hidden
    intermediate = max(8, round((hidden + (size - narrow) / per_unit) / 8) * 8)
    config = config_of(hidden, intermediate)
    count = _count(config)
    if not 0.9 * size <= count <= 1.1 * size:
        raise ConfigError(
            f"no {arch} of about {size:,} parameters with {len(tokenizer):,} tokens; the nearest has {count:,}",
            where="--size",
            fix=f"--size {max(1, round(count / 1e6))}m, or a tokenizer with fewer tokens",
        )
    return config


def init_model(arch: str, size: str, tokenizer_dir: str, out: Path, *, seed: int = 0, context: int = 1024) -> int:
    """Write a random-initialised model directory: configuration, weights, tokenizer, generation settings.

    Returns:
        How many parameters it has.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    config = choose_config(arch, parse_size(size), tokenizer, context)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "init", arch))
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = config.eos_token_id
    model.generation_config.pad_token_id = config.pad_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return model.num_parameters()


def _shape(hidden: int, intermediate: int, tokenizer: PreTrainedTokenizerBase, context: int) -> Shape:
    head_dim = 64 if hidden >= 256 else 32
    heads = hidden // head_dim
    end = tokenizer.eos_token_id
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": max(2, hidden // 32),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2 if heads % 2 == 0 else 1,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": end,
        "pad_token_id": tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end,
    }


def _count(config: PreTrainedConfig) -> int:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()
