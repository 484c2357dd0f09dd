"""Export of a run or checkpoint, local or remote, to a plain Hugging Face (or PEFT) directory."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hone.config.model import ModelConfig
from hone.data.image_processor import copy_processor, reads_images
from hone.data.model_settings import dequantised_by, read_settings
from hone.data.tokenizer import load_tokenizer
from hone.errors import CheckpointError, ConfigError, HoneError, near_path
from hone.hub.resolve import local_model, named_runs
from hone.models.four_bits import packed_base, require_package, rounded
from hone.models.loading import load_filled
from hone.models.streaming import WeightFiles
from hone.models.tied import merge_adapter
from hone.progress import progress
from hone.training.checkpoints.checkpoint import MANIFEST, find_checkpoint, model_directory
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.tensor_files import TensorFile, TensorSpec, write_tensors
from hone.training.checkpoints.weights import LARGEST_FILE, FileLayout

TOLERANCE = 1e-3  # largest difference of logits, as a share of the largest logit
PROMPT_TOKENS = 16


def prove_tensors(target: Storage, names: Mapping[str, str], expected: Callable[[str], Tensor]) -> int:
    """Compare the tensors of written files, given as the file of each name, with those expected; return their number.

    Raises CheckpointError: one differs or is missing.
    """
    with contextlib.ExitStack() as stack:
        files = {file: TensorFile(stack.enter_context(target.open(file)), file) for file in sorted(set(names.values()))}
        for name, file in names.items():
            right = expected(name)
            if name not in files[file].specs or not _equal(files[file].read(name), right):
                raise _refused(target, f"the tensor '{name}' in {file} is not the trained one")
    return len(names)


def prove_model(target: Storage, directory: Path, model: Any) -> int:
    """Compare the tensors of a written directory with those of the model in memory; return their number. Raises
    CheckpointError: one differs or is missing.
    """
    right = model.state_dict()
    seen = set()
    for name, value in WeightFiles(directory, model).tensors():
        if name not in right or not _equal(value, right[name]):
            raise _refused(target, f"the tensor '{name}' is not the trained one")
        seen.add(name)
    named = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if missing := sorted(named - seen - set(model.all_tied_weights_keys)):
        raise _refused(target, f"{len(missing)} trained tensors are missing, such as '{missing[0]}'")
    return len(seen)


def prove_logits(target: Storage, trained: Callable[[], Any], factory: Any, dtype: torch.dtype) -> tuple[float, float]:
    """Compare the logits of a written directory with those of the trained model; return their largest difference, and that which the
    dtype makes.

    In a narrow dtype the written model is compared with the trained one whose merged weights are rounded. ``trained``:
    loads the trained model in float32, its adapter not merged.

    Raises CheckpointError: they differ, or the directory lacks weights.
    """
    model = trained().eval()
    ids = _prompt(model.config)
    right = logits_of(model, ids)
    allowed = limit = TOLERANCE * max(1.0, float(right.abs().max()))
    by_dtype = 0.0
    if dtype != torch.float32:
        model = merge_adapter(model).eval() if hasattr(model, "peft_config") else model
        _check(target, logits_of(model, ids), right, limit)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype).float()
        narrow = logits_of(model, ids)
        by_dtype = float((narrow - right).abs().max())
        allowed, right = limit + 0.5 * by_dtype, narrow
    del model
    written, report = factory.from_pretrained(
        target.local_path, dtype=torch.float32, local_files_only=True, output_loading_info=True
    )
    if report["missing_keys"]:
        raise _refused(target, f"the files lack '{min(report['missing_keys'])}'")
    return _check(target, logits_of(written.eval(), ids), right, allowed), by_dtype


def fits_in_memory(directory: Path) -> bool:
    """Return whether this machine has the memory for a model of these files in float32, and half as much again."""
    sizes = 0
    for file in directory.glob("*.safetensors"):
        with file.open("rb") as stream:
            sizes += sum(spec.size // spec.dtype.itemsize * 4 for spec in TensorFile(stream, str(file)).specs.values())
    return sizes * 1.5 < psutil.virtual_memory().available


def _prompt(config: Any) -> Tensor:
    """Return a fixed prompt without special tokens ``[1, T]``, such as the placeholder of an image."""
    special = {value for name, value in _flat(config.to_dict()) if name.endswith(("token_id", "token_index"))}
    usual = [token for token in range(config.get_text_config().vocab_size) if token not in special]
    return torch.tensor([[usual[37 * place % len(usual)] for place in range(PROMPT_TOKENS)]])


def _flat(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    nested = [pair for value in values.values() if isinstance(value, dict) for pair in _flat(value)]
    return [(str(name), value) for name, value in values.items() if isinstance(value, int)] + nested


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=ids).logits
    return logits


def _check(target: Storage, written: Tensor, right: Tensor, limit: float) -> float:
    gap = float((written - right).abs().max()) if written.shape == right.shape else float("nan")
    if not gap <= limit:
        raise _refused(target, f"its logits differ by {gap:.3g} from those of the trained model (limit {limit:.3g})")
    return gap


def _equal(written: Tensor, right: Tensor) -> bool:
    return written.dtype == right.dtype and written.shape == right.shape and torch.equal(written, right)


def _refused(target: Storage, what: str) -> CheckpointError:
    return CheckpointError(
        f"the export to '{target}' was removed: {what}",
        why="the directory would be another model than the one that was trained",
        fix="export again; if the same appears, keep the adapter separate (--no-merge) and report it",
    )


_PREFIX = "base_model.model."


class WeightFolder:
    """Tensors of a model directory, read one at a time."""

    def __init__(self, files: dict[str, TensorFile]) -> None:
        self._files = files
        self.specs: dict[str, TensorSpec] = {name: file.specs[name] for name, file in files.items()}

    @classmethod
    def open(cls, directory: Path, stack: contextlib.ExitStack) -> WeightFolder | None:
        """Open the files until ``stack`` closes them; return None if the directory has no safetensors."""
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif (directory / "model.safetensors").is_file():
            names = ["model.safetensors"]
        else:
            return None
        files: dict[str, TensorFile] = {}
        for name in names:
            file = TensorFile(stack.enter_context((directory / name).open("rb")), str(directory / name))
            files |= dict.fromkeys(file.specs, file)
        return cls(files)

    def read(self, name: str) -> Tensor:
        return self._files[name].read(name)


@dataclass(frozen=True)
class PlainLora:
    """A LoRA adapter that only adds ``scaling * B @ A`` to linear layers (Hu et al. 2021)."""

    sides: dict[str, tuple[Tensor, Tensor]]  # A and B of each adapted weight
    scaling: float  # alpha / r, or alpha / sqrt(r) if rank-stabilised

    @classmethod
    def read(cls, directory: Path) -> PlainLora | None:
        """Read the adapter of a PEFT directory; return None if it is not plain."""
        config = json.loads((directory / "adapter_config.json").read_text())
        file = directory / "adapter_model.safetensors"
        if not _is_plain(config) or not file.is_file():
            return None
        layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in load_file(file).items():
            layer, _, side = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
            if side not in ("lora_A", "lora_B") or tensor.dim() != 2:
                return None
            layers.setdefault(f"{layer}.weight", {})[side] = tensor.float()
        rank = config["r"]
        scaling = config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)
        return cls({name: (sides["lora_A"], sides["lora_B"]) for name, sides in layers.items()}, scaling)

    def fits(self, weights: WeightFolder) -> bool:
        shapes = {name: (up.shape[0], down.shape[1]) for name, (down, up) in self.sides.items()}
        return all(name in weights.specs and weights.specs[name].shape == shape for name, shape in shapes.items())

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the weight with its adapter, in float32; other weights unchanged."""
        if name not in self.sides:
            return weight
        down, up = self.sides[name]
        return weight.float() + (up @ down) * self.scaling


def _is_plain(config: dict[str, Any]) -> bool:
    others = (
        "use_dora", "use_qalora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias",
        "target_parameters", "trainable_token_indices", "layer_replication", "alora_invocation_tokens",
    )  # fmt: skip
    usual_start = config.get("init_lora_weights") in (True, False, "gaussian")
    return (
        config.get("peft_type") == "LORA"
        and config.get("bias", "none") == "none"
        and usual_start
        and not any(config.get(name) for name in others)
    )


log = logging.getLogger("hone")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AVERAGE = "actor_ema"  # directory of a checkpoint with the average of the weights
SIZES = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def find_actor(source: str | Path) -> Path:
    """Return the local model directory of a source: itself, a checkpoint's actor, or that of a run's newest checkpoint.

    ``source``: path, URL, or name on the hub; ``RUN/checkpoints/best`` is the best checkpoint, and ``best/actor_ema``
    its average of the weights.

    Raises CheckpointError: there is no model, or it is damaged.
    """
    source = local_model(source)
    storage = Storage(source)
    if storage.is_file("config.json") or storage.is_file("adapter_config.json"):
        if storage.is_local:
            return storage.local_path
        if storage.parent.is_file(MANIFEST):
            return model_directory(str(storage.parent), storage.name)
    name = AVERAGE if storage.name == AVERAGE else "actor"
    try:
        checkpoint = find_checkpoint(str(storage.parent) if name == AVERAGE else source)
    except CheckpointError as error:
        unfinished = storage.is_local and not storage.is_file(MANIFEST)
        if unfinished and (storage / "actor").names():  # an unfinished checkpoint, given by its path
            return storage.local_path / "actor"
        if error.where == "trainer.resume_from_path" and "neither" in error.what:
            raise CheckpointError(
                f"'{source}' is not a model directory, a checkpoint, or a run with checkpoints",
                fix=near_path(str(source))
                or "give a directory with config.json, .../checkpoints/step_<N>, or a run directory (`hone runs list`)",
            ) from error
        raise
    if name == AVERAGE and not (checkpoint.storage / name).names():
        raise CheckpointError(
            f"'{checkpoint}' has no {name}",
            why="its run kept no average of the weights (optim.ema_decay=null)",
            fix=f"{checkpoint}, the trained weights",
        )
    checkpoint.verify(f"{name}/")
    return model_directory(str(checkpoint), name)


def resolve_runs(config: Any) -> None:
    """Put the model of its newest checkpoint in the place of each run that the configuration names as a model.

    An adapter becomes its base model and ``lora_adapter_path``.

    Raises CheckpointError: a run has no checkpoint, or a damaged one.
    """
    for key, block, name in list(named_runs(config)):
        actor = find_actor(Path(getattr(block, name)).expanduser())
        base = base_of_adapter(actor) if name == "path" and hasattr(block, "lora_adapter_path") else None
        setattr(block, name, str(base or actor))
        if base is not None:
            block.lora_adapter_path, block.tokenizer_path = str(actor), block.tokenizer_path or str(actor)
        log.info("%s: %s", key, actor)


def base_of_adapter(actor: Path) -> Path | None:
    config = actor / "adapter_config.json"
    if not config.is_file():
        return None
    return Path(local_model(json.loads(config.read_text())["base_model_name_or_path"]))


def model_class(directory: Path) -> Any:
    settings = read_settings(directory)
    if "SequenceClassification" in " ".join(settings.get("architectures") or []):
        return AutoModelForSequenceClassification
    return AutoModelForImageTextToText if reads_images(settings) else AutoModelForCausalLM


def export(
    source: str | Path,
    out: str | Path,
    *,
    merge: bool = True,
    dtype: str = "auto",
    largest_file: int = LARGEST_FILE,
    report: Callable[[str], None] = log.info,
) -> str:
    """Write the model in ``source`` to ``out``, one tensor at a time, and prove that it is the trained one.

    Its tensors are read back. Where ``out`` is local and a model fits in memory, logits are compared too.

    Args:
        out: directory or URL to write; must be empty or not exist.
        merge: for a LoRA run, merge the adapter into its base; otherwise copy the adapter.
        dtype: of the weights written; auto: that of the trained weights, for an adapter of its base.
        largest_file: maximum of bytes in a safetensors file.

    Returns:
        The path or URL of the written directory.

    Raises:
        CheckpointError: ``source`` has no model, or ``out`` is not empty, cannot be written, or is not the trained model.
        ConfigError: unknown dtype.
    """
    if dtype not in ("auto", *DTYPES):
        raise ConfigError(f"unknown dtype '{dtype}'", fix=f"--dtype auto|{'|'.join(DTYPES)}")
    target = Storage(out)
    if target.names():
        raise CheckpointError(
            f"'{out}' is not empty", why="files of two models would be mixed", fix="--out <new directory>"
        )
    actor = find_actor(source)
    base = base_of_adapter(actor)
    written = _stored_dtype(base or actor) if dtype == "auto" else DTYPES[dtype]
    try:
        if base is not None and not merge:
            _copy(actor, target)
        else:
            count = _write_model(actor, base, target, written, largest_file)
            report(_proof(actor, base, target, written, count))
    except CheckpointError:
        target.remove()
        raise
    except OSError as error:
        raise CheckpointError(
            f"cannot write '{out}': {error}",
            why="the directory has an incomplete model",
            fix="--out <another directory>",
        ) from error
    return str(out)


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as "5GB", "500MB" or "2GiB".

    Raises ConfigError: the text has another form.
    """
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(MB|GB|MiB|GiB)", text.strip(), re.IGNORECASE)
    if not size or float(size[1]) == 0:
        raise ConfigError(f"'{text}' is not a file size", fix="--max-shard-size 5GB (units: MB, GB, MiB, GiB)")
    return int(float(size[1]) * SIZES[size[2].upper()])


def _stored_dtype(model: Path) -> torch.dtype:
    """Return the dtype of most weights of a directory; of quantised ones, and without safetensors, float32."""
    sizes = Counter[torch.dtype]()
    with contextlib.ExitStack() as stack:
        weights = WeightFolder.open(model, stack)
        for spec in weights.specs.values() if weights is not None else ():
            sizes[spec.dtype] += spec.size
    dtype = max(sizes, key=sizes.__getitem__, default=torch.float32)
    return dtype if dtype in DTYPES.values() else torch.float32


def _write_model(actor: Path, base: Path | None, target: Storage, dtype: torch.dtype, largest_file: int) -> int:
    """Write the model and return the number of tensors that were read back equal."""
    model = base or actor
    if not (model / "config.json").is_file():
        raise CheckpointError(
            f"the adapter in '{actor}' has the base model '{model}', which has no config.json",
            why="merging needs the base's weights",
            fix="--no-merge, or set base_model_name_or_path in adapter_config.json to the directory of the base model",
        )
    lora = PlainLora.read(actor) if base is not None else None
    method, packed = packed_base(actor)
    require_package(method)
    with contextlib.ExitStack() as stack:
        weights = WeightFolder.open(model, stack)
        tied = _tied(model)
        quantised = "quantization_config" in read_settings(model)
        if (
            quantised
            or weights is None
            or not packed <= set(weights.specs)
            or (base is not None and (lora is None or not lora.fits(weights) or tied & set(lora.sides)))
        ):
            return _write_loaded(actor, base, target, dtype, largest_file)
        specs = {name: _cast(weights.specs[name], dtype) for name in weights.specs if name not in tied}
        layout = FileLayout("model", 1, largest_file)
        for name, spec in specs.items():
            layout.add(name, spec)

        def value(name: str) -> torch.Tensor:
            tensor = rounded(weights.read(name), method) if name in packed else weights.read(name)
            if lora is not None:
                tensor = lora.merged(name, tensor)
            return tensor.to(specs[name].dtype)

        with progress("tensors", len(specs)) as bar:

            def counted(name: str) -> torch.Tensor:
                bar.advance()
                return value(name)

            for file, file_specs in layout.files_of(0).items():
                with target.create(file) as stream:
                    write_tensors(stream, file_specs, counted)
        files = {name: file for file, file_specs in layout.files_of(0).items() for name in file_specs}
        proved = prove_tensors(target, files, value)
    if index := layout.index():
        target.write_text("model.safetensors.index.json", json.dumps(index, indent=1))
    config = json.loads((model / "config.json").read_text())
    config.pop("torch_dtype", None)
    target.write_text("config.json", json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2))
    for file in (model / "generation_config.json", *sorted(model.glob("*.py"))):
        if file.is_file():
            target.write_text(file.name, file.read_text())
    _write_processing(actor, base, target)
    return proved


def _proof(actor: Path, base: Path | None, target: Storage, dtype: torch.dtype, count: int) -> str:
    """Compare logits where a model fits in memory, and return what was proved in words."""
    proof = f"proved: all {count} tensors were read back as trained"
    if (method := packed_base(actor)[0]) != "none":
        proof += f", the base with its values rounded to {method}"
    if not target.is_local:
        return f"{proof}; logits were not compared, because the directory is remote"
    if not fits_in_memory(target.local_path):
        return f"{proof}; logits were not compared, because a model does not fit in memory"

    def trained() -> Any:
        model = _loaded(actor, base)
        return model if base is None else PeftModel.from_pretrained(model, str(actor))

    gap, by_dtype = prove_logits(target, trained, model_class(target.local_path), dtype)
    rounds = (
        f"; rounding to {str(dtype).removeprefix('torch.')} changes them by at most {by_dtype:.1e}" if by_dtype else ""
    )
    return f"{proof}; logits on a fixed prompt differ by at most {gap:.1e} from the trained model's{rounds}"


def _loaded(actor: Path, base: Path | None) -> Any:
    """Load the model in float32 as it was trained, without an adapter."""
    model = _base_model(actor, base)
    method, packed = packed_base(actor)
    require_package(method)
    for name in packed:
        weight = model.get_parameter(name)
        weight.data = rounded(weight.data, method)
    return model


def _base_model(actor: Path, base: Path | None) -> Any:
    model = _classifier_of_adapter(actor, base, torch.float32) if base is not None else None
    if model is None:
        folder = base or actor
        if dequantised_by(read_settings(folder), folder):
            return load_filled(model_class(folder), ModelConfig(str(folder)))
        model = model_class(folder).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.tie_weights()  # transformers keeps another head that a file repeats
    return model


def _write_loaded(actor: Path, base: Path | None, target: Storage, dtype: torch.dtype, largest_file: int) -> int:
    """Load and write the whole model, for other weights than safetensors and other adapters than plain LoRA."""
    model = _loaded(actor, base)
    if base is not None:
        model = merge_adapter(PeftModel.from_pretrained(model, str(actor)))
    torch.nn.Module.to(model, dtype)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size=largest_file)
        target.put(Path(folder))
        proved = prove_model(
            target, target.local_path if target.is_local else target.fetch(Path(folder) / "back"), model
        )
    _write_processing(actor, base, target)
    return proved


def _classifier_of_adapter(actor: Path, base: Path, dtype: torch.dtype) -> Any:
    """Load the base of an adapted reward model, whose output layer is in the adapter; None for any other adapter."""
    task = json.loads((actor / "adapter_config.json").read_text()).get("task_type")
    kinds = {"SEQ_CLS": AutoModelForSequenceClassification, "TOKEN_CLS": AutoModelForTokenClassification}
    if task not in kinds:
        return None
    tokenizer = load_tokenizer(str(actor))
    model = kinds[task].from_pretrained(base, dtype=dtype, local_files_only=True, num_labels=1)
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    model.config.pad_token_id = None if pad == end else pad  # as it was trained, see set_padding
    return model


def _write_processing(actor: Path, base: Path | None, target: Storage) -> None:
    with tempfile.TemporaryDirectory() as folder:
        load_tokenizer(str(actor)).save_pretrained(folder)
        copy_processor(base or actor, folder)
        if (settings := actor / "generation_config.json").is_file():  # of an adapter: stops at what was trained
            shutil.copy(settings, folder)
        target.put(Path(folder))


def _copy(actor: Path, target: Storage) -> None:
    for file in sorted(path for path in actor.rglob("*") if path.is_file()):
        with file.open("rb") as source, target.create(str(file.relative_to(actor))) as copy:
            shutil.copyfileobj(source, copy, 1 << 20)


def _cast(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    return TensorSpec(dtype, spec.shape) if spec.dtype.is_floating_point else spec


def _tied(directory: Path) -> set[str]:
    """Return the names of weights that the model ties to others, whose entries in files are not used."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.device("meta"):
            model = model_class(directory).from_config(config)
    except (ValueError, ImportError, KeyError) as error:
        raise HoneError(f"transformers cannot build the model in '{directory}': {error}") from error
    return set(model.all_tied_weights_keys)
