"""Processes and models that the integration tests share.

What takes long to import is imported in the fixtures: pytest reads this file before it starts the processes that run tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.ranks import Ranks

pytest.register_assert_rewrite("support.train_backend_suite", "support.backend_checks")


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Ranks]:
    from support.ranks import Ranks

    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Ranks]:
    from support.ranks import Ranks

    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories by name: tied and untied embeddings, experts of two kinds, layers with states."""
    from support.backend_cases import save_model
    from support.families import RECURRENT, ROUTED

    root = tmp_path_factory.mktemp("models")
    recurrent = ("qwen3_5_moe_text", "falcon_h1", "mamba2", "jamba", "minimax")
    return {
        "tied": save_model(root / "tied", "qwen3", tie_word_embeddings=True),
        "untied": save_model(root / "untied", "llama", tie_word_embeddings=False),
        "qwen2": save_model(root / "qwen2", "qwen2", tie_word_embeddings=False),
        "odd": save_model(root / "odd", "qwen2", tie_word_embeddings=True, vocab_size=63),
        "olmo": save_model(root / "olmo", "olmo2", tie_word_embeddings=False),
        "experts": save_model(root / "experts", "qwen3_moe", tie_word_embeddings=False),
        "deep": save_model(root / "deep", "qwen3", tie_word_embeddings=True, num_hidden_layers=5),
        "three heads": save_model(root / "three", "qwen3", num_attention_heads=3, num_key_value_heads=1),
        "gpt_oss": save_model(root / "gpt_oss", "gpt_oss", tie_word_embeddings=False),
        "biased router": save_model(root / "biased", "glm4_moe", **ROUTED),
        **{arch: save_model(root / arch, arch, **RECURRENT[arch]) for arch in recurrent},
    }


@pytest.fixture(scope="session")
def image_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of models that read images, by architecture."""
    from support.image_models import ARCHITECTURES, image_model, make_lively

    return {arch: make_lively(image_model(tmp_path_factory.mktemp(arch), arch, "200k")) for arch in ARCHITECTURES}
