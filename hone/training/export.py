"""From a run or checkpoint, wherever it lies, to a plain Hugging Face (or PEFT) directory."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from hone.data.tokenizer import load_tokenizer
from hone.errors import CheckpointError, ConfigError, HoneError
from hone.training.checkpoints.checkpoint import MANIFEST, find_checkpoint, model_directory
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.tensor_files import TensorSpec, write_tensors
from hone.training.checkpoints.weights import LARGEST_FILE, Shelf
from hone.training.weight_files import PlainLora, WeightFolder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def find_actor(source: str | Path) -> Path:
    """The local model directory meant by ``source``: itself, a checkpoint's actor, or that of a run's newest checkpoint.

    Args:
        source: path or URL; ``RUN/checkpoints/best`` is the best checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    storage = Storage(source)
    if storage.is_file("config.json") or storage.is_file("adapter_config.json"):
        if storage.is_local:
            return storage.local_path
        if storage.parent.is_file(MANIFEST):
            return model_directory(str(storage.parent), storage.name)
    try:
        checkpoint = find_checkpoint(source)
    except CheckpointError as error:
        if storage.is_local and (storage / "actor").names():  # not finished, but asked for by name
            return storage.local_path / "actor"
        if error.where == "trainer.resume_from_path" and "neither" in error.what:
            raise CheckpointError(
                f"'{source}' is neither a model directory, nor a checkpoint, nor a run with checkpoints",
                fix="give a directory with config.json, .../checkpoints/step_<N>, or a run directory (`hone runs list`)",
            ) from error
        raise
    return model_directory(str(checkpoint), "actor")


def base_of_adapter(actor: Path) -> Path | None:
    """The base model's directory when ``actor`` is a PEFT adapter, else None."""
    config = actor / "adapter_config.json"
    return Path(json.loads(config.read_text())["base_model_name_or_path"]) if config.is_file() else None


def model_class(directory: Path) -> Any:
    """The class that loads what ``directory`` holds: a reward model keeps its scalar output, all else is a causal model."""
    kinds = " ".join(json.loads((directory / "config.json").read_text()).get("architectures") or [])
    return AutoModelForSequenceClassification if "SequenceClassification" in kinds else AutoModelForCausalLM


def export(
    source: str | Path,
    out: str | Path,
    *,
    merge: bool = True,
    dtype: str = "float32",
    largest_file: int = LARGEST_FILE,
) -> str:
    """Write the model in ``source`` to ``out``, a tensor at a time.

    Args:
        source: run, checkpoint or model directory, or its URL.
        out: directory or URL to write; it must not exist, or be empty.
        merge: for a LoRA run, merge the adapter into its base; otherwise copy the adapter.
        dtype: of the weights written.
        largest_file: bytes of one safetensors file.

    Returns:
        Where it lies.

    Raises:
        CheckpointError: no model there, or ``out`` is not empty or cannot be written.
        ConfigError: unknown dtype.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype '{dtype}'", fix=f"--dtype {'|'.join(DTYPES)}")
    target = Storage(out)
    if target.names():
        raise CheckpointError(f"'{out}' is not empty", why="files of two models would mix", fix="--out <new directory>")
    actor = find_actor(source)
    base = base_of_adapter(actor)
    try:
        if base is not None and not merge:
            _copy(actor, target)
        else:
            _write_model(actor, base, target, DTYPES[dtype], largest_file)
    except OSError as error:
        raise CheckpointError(
            f"cannot write '{out}': {error}", why="what stands there is not a whole model", fix="--out <another place>"
        ) from error
    return str(out)


def parse_size(text: str) -> int:
    """Bytes of "5GB", "500MB", "2GiB".

    Raises:
        ConfigError: it is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB|MiB|GiB)", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) == 0:
        raise ConfigError(f"'{text}' is no size of a file", fix="--max-shard-size 5GB (MB, GB, MiB and GiB are known)")
    return int(float(found[1]) * SIZES[found[2].upper()])


def _write_model(actor: Path, base: Path | None, target: Storage, dtype: torch.dtype, largest_file: int) -> None:
    model = base or actor
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"the base of the adapter in '{actor}' is '{model}', and there is no model",
            why="merging needs the base's weights",
            fix="--no-merge, or put the base there, or name its place as base_model_name_or_path in adapter_config.json",
        )
    lora = PlainLora.read(actor) if base is not None else None
    with contextlib.ExitStack() as stack:
        weights = WeightFolder.open(model, stack)
        if weights is None or (base is not None and (lora is None or not lora.fits(weights))):
            _write_loaded(actor, base, target, dtype, largest_file)
            return
        specs = {name: _cast(weights.specs[name], dtype) for name in weights.specs if name not in _tied(model)}
        shelf = Shelf("model", 1, largest_file)
        for name, spec in specs.items():
            shelf.place(name, spec)

        def value(name: str) -> torch.Tensor:
            tensor = weights.read(name)
            if lora is not None:
                tensor = lora.merged(name, tensor)
            return tensor.to(specs[name].dtype)

        for file, held in shelf.files_of(0).items():
            with target.create(file) as stream:
                write_tensors(stream, held, value)
    if index := shelf.index():
        target.write_text("model.safetensors.index.json", json.dumps(index, indent=1))
    config = json.loads((model / "config.json").read_text())
    config.pop("torch_dtype", None)
    target.write_text("config.json", json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2))
    for file in (model / "generation_config.json", *sorted(model.glob("*.py"))):
        if file.is_file():
            target.write_text(file.name, file.read_text())
    _write_tokenizer(actor, target)


def _write_loaded(actor: Path, base: Path | None, target: Storage, dtype: torch.dtype, largest_file: int) -> None:
    """The way over memory, for what cannot be streamed: weights that are no safetensors, adapters other than plain LoRA."""
    model = model_class(base or actor).from_pretrained(base or actor, dtype=dtype, local_files_only=True)
    if base is not None:
        model = PeftModel.from_pretrained(model, str(actor)).merge_and_unload()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=largest_file)
        target.put(Path(folder))
    _write_tokenizer(actor, target)


def _write_tokenizer(actor: Path, target: Storage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        load_tokenizer(str(actor)).save_pretrained(folder)
        target.put(Path(folder))


def _copy(actor: Path, target: Storage) -> None:
    for file in sorted(path for path in actor.rglob("*") if path.is_file()):
        with file.open("rb") as source, target.create(str(file.relative_to(actor))) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


def _cast(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(dtype, spec.shape) if spec.dtype.is_floating_point else spec


def _tied(directory: Path) -> set[str]:
    """Weights that are another's by the model's own word; what a file says of them is not used."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model = model_class(directory).from_config(config)
    except (ValueError, ImportError, KeyError) as error:
        raise HoneError(f"'{directory}' holds no model that transformers knows: {error}") from error
    return set(model.all_tied_weights_keys)
