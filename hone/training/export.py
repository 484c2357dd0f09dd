"""From a run or checkpoint to a plain Hugging Face (or PEFT) directory."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hone.data.tokenizer import load_tokenizer
from hone.errors import CheckpointError, ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_actor(source: Path) -> Path:
    """The model directory meant by ``source``: itself, a checkpoint's actor, or that of a run's newest checkpoint.

    Raises:
        CheckpointError: there is none.
    """
    if (source / "config.json").is_file() or (source / "adapter_config.json").is_file():
        return source
    if (source / "actor").is_dir():
        return source / "actor"
    steps = [path for path in source.glob("checkpoints/step_*") if re.fullmatch(r"step_\d+", path.name)]
    if steps:
        return max(steps, key=lambda path: int(path.name[5:])) / "actor"
    raise CheckpointError(
        f"'{source}' is neither a model directory, nor a checkpoint, nor a run with checkpoints",
        fix="give a directory with config.json, .../checkpoints/step_<N>, or a run directory (`hone runs list`)",
    )


def base_of_adapter(actor: Path) -> Path | None:
    """The base model's directory when ``actor`` is a PEFT adapter, else None."""
    config = actor / "adapter_config.json"
    return Path(json.loads(config.read_text())["base_model_name_or_path"]) if config.is_file() else None


def model_class(directory: Path) -> Any:
    """The class that loads what ``directory`` holds: a reward model keeps its scalar output, all else is a causal model."""
    kinds = " ".join(json.loads((directory / "config.json").read_text()).get("architectures") or [])
    return AutoModelForSequenceClassification if "SequenceClassification" in kinds else AutoModelForCausalLM


def export(source: Path, out: Path, *, merge: bool = True, dtype: str = "float32") -> Path:
    """Write the model in ``source`` to ``out``.

    Args:
        source: run, checkpoint or model directory.
        out: directory to write; it must not exist, or be empty.
        merge: for a LoRA run, merge the adapter into its base; otherwise copy the adapter.
        dtype: of the weights written.

    Raises:
        CheckpointError: no model there, or ``out`` is not empty.
        ConfigError: unknown dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'", fix=f"--dtype {'|'.join(DTYPES)}")
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"'{out}' is not empty", why="files of two models would mix", fix="--out <new directory>")
    actor = find_actor(source)
    base = base_of_adapter(actor)
    if base is not None and not merge:
        shutil.copytree(actor, out, dirs_exist_ok=True)
        return out
    factory = model_class(base or actor)
    model = factory.from_pretrained(base or actor, dtype=DTYPES[dtype], local_files_only=True)
    if base is not None:
        model = PeftModel.from_pretrained(model, str(actor)).merge_and_unload()
    model.save_pretrained(out)
    load_tokenizer(str(actor)).save_pretrained(out)
    return out
