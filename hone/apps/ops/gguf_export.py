"""Export of a model directory as one GGUF file, the format of llama.cpp and its kin.

Tensor names come from the package ``gguf``; what a file means beyond them (the order of rotary dimensions, the kind of tokenizer) is
written here, for the architectures of :data:`ARCHITECTURES`. The file is read back by Transformers and compared with its source.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hone.data.tokenizer import load_tokenizer
from hone.errors import CheckpointError, ConfigError, ModelError
from hone.extras import install_command
from hone.progress import tracked
from hone.training.export import (
    WeightFolder,
    base_of_adapter,
    export,
    find_actor,
    fits_in_memory,
    logits_of,
)

TYPES = ("f32", "f16", "bf16", "q8_0", "q5_1", "q4_1", "q4_0")
"""Types of matrices that ``gguf`` can write. Vectors are float32; embedding and head have at least 8 bits, as llama.cpp keeps them."""
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""Architecture of the file by ``model_type``."""
LIMITS = {"f32": 1e-3, "bf16": 0.1, "f16": 0.02, "q8_0": 0.1}
"""Largest mean gap of log-probs that a file of the type has; others have none, since coarse types change a model as they like."""

_TEXT = "The sky is blue because the air scatters short waves of light more than long ones. In the evening"

_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {rf"{_WORD}|\p{{N}}{_REST}": "qwen2", rf"{_WORD}|\p{{N}}{{1,3}}{_REST}": "llama-bpe"}
"""Names that llama.cpp has for the regular expressions of tokenizers."""


def export_gguf(source: str | Path, out: str | Path, kind: str, *, report: Callable[[str], None]) -> str:
    """Write the model in ``source``, an adapter merged, as one GGUF file, and compare it with its source.

    Args:
        source: as in :func:`hone.training.export.export`.
        out: file to write; it must not exist, and its name ends with ``.gguf``.
        kind: type of the matrices, one of :data:`TYPES`.
        report: receives one line about what was compared.

    Raises:
        ConfigError: unknown type, or ``out`` is not such a file.
        ModelError: the package ``gguf`` is missing, or the file cannot say what this model or tokenizer is.
        CheckpointError: the file is another model than its source.
    """
    file = Path(out)
    if kind not in TYPES:
        raise ConfigError(f"unknown type '{kind}' of a GGUF file", fix=f"--gguf {'|'.join(TYPES)}")
    if file.suffix != ".gguf" or file.exists():
        what = "exists" if file.exists() else "does not end with .gguf"
        raise ConfigError(f"'{out}' {what}", why="a GGUF model is one new file", fix="--out NAME.gguf")
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("--gguf needs the package gguf", fix=install_command("gguf"), code="E-extra")
    actor = find_actor(source)
    settings = _settings(base_of_adapter(actor) or actor)  # before an export that takes long
    tokenizer_fields(actor, settings.vocab_size)
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}-") as scratch:
        directory, part = Path(scratch) / "model", Path(scratch) / file.name
        export(source, directory, dtype="float32" if kind == "f32" else "auto", report=report)
        write_gguf(directory, part, kind)
        report(_compared(directory, part, kind))
        part.rename(file)
    return str(file)


def write_gguf(directory: Path, file: Path, kind: str) -> None:
    """Write a model directory with safetensors as a GGUF file.

    Raises ModelError: the file cannot say what this model or tokenizer is.
    """
    import gguf

    settings = _settings(directory)
    architecture = gguf.MODEL_ARCH[ARCHITECTURES[settings.model_type]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[architecture], use_temp_file=True)
    _add_settings(writer, settings)
    for name, value in tokenizer_fields(directory, settings.vocab_size).items():
        getattr(writer, f"add_{name}")(value)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}" if kind != "f32" else "ALL_F32"])
    names = gguf.get_tensor_name_map(architecture, settings.num_hidden_layers)
    types = gguf.GGMLQuantizationType
    matrices = types[kind.upper()]
    block = gguf.GGML_QUANT_SIZES[matrices][0]
    with contextlib.ExitStack() as stack:
        weights = WeightFolder.open(directory, stack)
        assert weights is not None  # export writes safetensors
        for name, spec in tracked(sorted(weights.specs.items()), "tensors", len(weights.specs)):
            written = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if written is None:
                raise ModelError(f"GGUF has no name for the tensor '{name}' of a {settings.model_type}")
            narrow = matrices if block == 1 or not written.startswith(("token_embd", "output.")) else types.Q8_0
            kind_here = types.F32 if len(spec.shape) < 2 else narrow if spec.shape[-1] % block == 0 else types.F16
            value = _rotated(name, weights.read(name).float(), settings)
            writer.add_tensor(written, gguf.quants.quantize(value.numpy(), kind_here), raw_dtype=kind_here)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    writer.close()


def _settings(directory: Path) -> Any:
    """Return the configuration of a model that a file can describe."""
    settings = AutoConfig.from_pretrained(directory, local_files_only=True)
    rope = getattr(settings, "rope_parameters", None) or {}
    window = (
        settings.sliding_window
        if getattr(settings, "use_sliding_window", hasattr(settings, "sliding_window"))
        else None
    )
    faults = [
        (settings.model_type not in ARCHITECTURES, f"its model_type is {settings.model_type}"),
        (
            rope.get("rope_type", "default") != "default",
            f"its rotary positions are of the type {rope.get('rope_type')}",
        ),
        (rope.get("partial_rotary_factor", 1.0) != 1.0, "its rotary positions turn a part of each head"),
        (window, f"it attends to a window of {window} tokens"),
        (getattr(settings, "hidden_act", "silu") != "silu", f"its activation is {getattr(settings, 'hidden_act', '')}"),
    ]
    if what := next((what for fault, what in faults if fault), None):
        raise ModelError(
            f"the model cannot be written as GGUF: {what}",
            why=f"written are {', '.join(ARCHITECTURES)} with plain rotary positions and full attention",
            fix="export without --gguf, and convert the directory with llama.cpp's convert_hf_to_gguf.py",
        )
    return settings


def _add_settings(writer: Any, settings: Any) -> None:
    heads = settings.num_attention_heads
    width = getattr(settings, "head_dim", None) or settings.hidden_size // heads
    writer.add_vocab_size(settings.vocab_size)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(settings.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(settings.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)


def _rotated(name: str, value: Tensor, settings: Any) -> Tensor:
    """Return queries and keys of the llama architecture with the halves of each head interleaved, as its rotary positions expect."""
    heads = {"q_proj": settings.num_attention_heads, "k_proj": settings.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or ARCHITECTURES[settings.model_type] != "LLAMA":
        return value
    return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape).contiguous()


def tokenizer_fields(directory: Path, rows: int) -> dict[str, Any]:
    """Return the fields of a tokenizer in a GGUF file, by the end of their method's name in ``GGUFWriter``.

    Args:
        directory: its ``tokenizer.json`` is a byte-level BPE tokenizer.
        rows: of the embedding; those without a token are named.

    Raises ModelError: it is another tokenizer, or splits text in a way that llama.cpp has no name for.
    """
    from gguf import TokenType

    tokenizer: Any = load_tokenizer(str(directory))
    source = json.loads(tokenizer.backend_tokenizer.to_str())
    name = _pre_tokenizer(source)
    added = {entry["id"]: entry["special"] for entry in source["added_tokens"]}
    names = {number: text for text, number in tokenizer.get_vocab().items()}
    if max(names) >= rows:
        raise ModelError(
            f"the tokenizer has the id {max(names)}, the embedding {rows} rows", fix="a model of this tokenizer"
        )
    fields: dict[str, Any] = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": name,
        "token_list": [names.get(number, f"[PAD{number}]") for number in range(rows)],
        "token_types": [
            TokenType.UNUSED if number not in names
            else TokenType.NORMAL if number not in added
            else TokenType.CONTROL if added[number] else TokenType.USER_DEFINED
            for number in range(rows)
        ],
        "token_merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in source["model"]["merges"]],
    }  # fmt: skip
    for role in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{role}_token_id")) is not None:
            fields[f"{role}_token_id"] = number
    ids = tokenizer("a")["input_ids"]
    fields |= {"add_bos_token": ids[0] == tokenizer.bos_token_id, "add_eos_token": ids[-1] == tokenizer.eos_token_id}
    if tokenizer.chat_template:
        fields["chat_template"] = tokenizer.chat_template
    return fields


def _pre_tokenizer(source: dict[str, Any]) -> str:
    """Return llama.cpp's name for how a byte-level BPE tokenizer splits text before merging."""
    first = source["pre_tokenizer"] or {}
    parts = first.get("pretokenizers", [first])
    kinds = [part.get("type") for part in parts]
    bytes_only = parts[-1].get("type") == "ByteLevel" and not parts[-1].get("add_prefix_space")
    normal = (source["normalizer"] or {}).get("type") in (None, "NFC")
    name = None
    if source["model"]["type"] == "BPE" and bytes_only and normal:
        splits = parts[-1].get("use_regex", True)
        if kinds == ["ByteLevel"] and splits:
            name = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and splits and parts[0]["individual_digits"]:
            name = "smollm"
        elif (
            kinds == ["Split", "ByteLevel"]
            and not splits
            and parts[0] == {**parts[0], "behavior": "Isolated", "invert": False}
        ):
            name = SPLITS.get(parts[0]["pattern"].get("Regex", ""))
    if name is None or source["model"].get("ignore_merges", False) != (name == "llama-bpe"):  # as llama.cpp does
        raise ModelError(
            f"the tokenizer ({source['model']['type']}, {', '.join(map(str, kinds))}) cannot be written as GGUF",
            why=f"a file names one of llama.cpp's ways to split text; known are gpt-2, smollm, {', '.join(SPLITS.values())}",
            fix="export without --gguf, and convert the directory with llama.cpp's convert_hf_to_gguf.py",
        )
    return name


def _compared(directory: Path, file: Path, kind: str) -> str:
    """Compare a file with its source by the greedy tokens after a fixed text, and return what was seen in words."""
    from transformers.utils.logging import disable_progress_bar

    if not fits_in_memory(directory):
        return "not read back, because a model does not fit in memory"
    disable_progress_bar()
    right: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    ids = load_tokenizer(str(directory))(_TEXT, return_tensors="pt")["input_ids"]
    ids = right.generate(ids, max_new_tokens=32, min_new_tokens=32, do_sample=False, pad_token_id=0)
    expected = logits_of(right, ids).log_softmax(-1)
    settings = right.config
    # Transformers does not read the width of heads of Qwen 3: it takes 128
    known = {"config": settings} if settings.model_type == "qwen3" and settings.head_dim != 128 else {}
    del right
    read = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, local_files_only=True, **known
    ).eval()
    got = logits_of(read, ids).log_softmax(-1)
    chosen = ids[:, 1:, None]
    gap = (got[:, :-1].gather(-1, chosen) - expected[:, :-1].gather(-1, chosen)).abs()
    mean, same = float(gap.mean()), int((got.argmax(-1) == expected.argmax(-1)).sum())
    seen = f"log-probs of {gap.numel()} tokens differ by {mean:.1e} on average, {same} of {ids.numel()} most likely tokens are equal"
    if not mean <= LIMITS.get(kind, float("inf")):
        raise CheckpointError(
            f"the GGUF file was removed: {seen}",
            why=f"at most {LIMITS[kind]:g} is expected of {kind}: the file would be another model",
            fix="report it, and export without --gguf meanwhile",
        )
    return f"read back by Transformers: {seen}"
