"""GGUF files against their source: read back by Transformers, whose loader is not Hone's, and field by field by gguf's reader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_level import ROWS, byte_level_model
from support.messages import raises
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from hone.apps.ops.gguf_export import SPLITS, export_gguf
from hone.errors import ConfigError, ModelError

gguf = pytest.importorskip("gguf")
ABOUT = pytest.mark.application("hone/apps/ops/gguf_export.py", "hone/training/export.py", "constraints.txt")


@pytest.mark.parametrize(
    ("kind", "type_", "splits", "tied", "gap"),
    [
        ("llama", "f32", "smollm", True, 1e-4),
        pytest.param("mistral", "f16", "gpt-2", False, 1e-2, marks=ABOUT),
        pytest.param("qwen2", "f16", "qwen2", False, 1e-2, marks=ABOUT),
        pytest.param("qwen3", "bf16", "llama-bpe", True, 1e-1, marks=ABOUT),
        ("qwen3", "q8_0", "qwen2", True, 1e-1),
        pytest.param("llama", "q4_0", "gpt-2", False, None, marks=ABOUT),
    ],
)
def test_a_file_is_its_source(
    tmp_path: Path, kind: str, type_: str, splits: str, tied: bool, gap: float | None
) -> None:
    width = {"bf16": 128, "q8_0": 32}.get(type_, 16)
    source = byte_level_model(tmp_path / "model", kind, splits, width, tie_word_embeddings=tied)
    lines: list[str] = []
    file = export_gguf(source, tmp_path / "out/model.gguf", type_, report=lines.append)
    assert "read back by Transformers: log-probs of" in lines[-1]
    right = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    known = {"config": right.config} if right.config.head_dim == 32 else {}  # Transformers takes 128 for Qwen 3
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32, **known)
    ids = torch.randint(3, 400, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        difference = (read(ids).logits.log_softmax(-1) - right(ids).logits.log_softmax(-1)).abs()
    assert float(difference.mean()) < (gap or 1.0)
    fields = gguf.GGUFReader(file).fields
    inner = PreTrainedTokenizerFast.from_pretrained(source)
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert tokens[: len(inner)] == inner.convert_ids_to_tokens(range(len(inner)))
    assert len(tokens) == ROWS and tokens[-1] == f"[PAD{ROWS - 1}]"
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert (kinds[0], kinds[5], kinds[len(inner) - 1], kinds[-1]) == (
        3,
        1,
        4,
        5,
    )  # control, normal, user-defined, unused
    named = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in ("pre", "eos_token_id", "add_bos_token")}
    assert named == {"pre": splits, "eos_token_id": 0, "add_bos_token": False}
    assert fields["tokenizer.chat_template"].contents() == inner.chat_template


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kind": "olmo2"}, ["olmo2", "qwen3"]),
        ({"kind": "mistral", "sliding_window": 16}, ["16 tokens"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, ["yarn"]),
        ({"hidden_act": "gelu"}, ["gelu"]),
    ],
)
def test_what_a_file_cannot_say_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    source = byte_level_model(tmp_path / "model", changes.pop("kind", "llama"), **changes)
    with raises(ModelError, *words):
        export_gguf(source, tmp_path / "model.gguf", "f16", report=print)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_tokenizer_that_llama_cpp_has_no_name_for_is_refused(tmp_path: Path) -> None:
    source = byte_level_model(tmp_path / "model", "llama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save_pretrained(source)
    with raises(ModelError, "Whitespace", "smollm"):
        export_gguf(source, tmp_path / "model.gguf", "f16", report=print)


def test_names_and_types_are_checked_before_anything_is_written(tmp_path: Path) -> None:
    (tmp_path / "old.gguf").write_text("mine")
    for out, kind, word in (("old.gguf", "f16", "exists"), ("folder", "f16", ".gguf"), ("new.gguf", "q3", "q8_0")):
        with raises(ConfigError, word):
            export_gguf(tmp_path, tmp_path / out, kind, report=print)
    assert (tmp_path / "old.gguf").read_text() == "mine"


def test_the_pattern_of_qwen_is_that_of_its_tokenizer() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert SPLITS[PRETOKENIZE_REGEX] == "qwen2"
