"""Weights of a model of any layout as a Hugging Face directory, or a PEFT directory if it has adapters."""

from __future__ import annotations

import copy
import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from hone.data.assistant_mask import end_of_turn
from hone.data.image_processor import copy_processor
from hone.insight import activity
from hone.models.four_bits import write_record
from hone.models.images import find_processor
from hone.training.checkpoints.shards import to_host, wait_for_copies
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.tensor_files import TensorSpec, write_tensors

LARGEST_FILE = 5 * 10**9  # bytes; the usual size for transformers and the hub


def stage_weights(
    model: nn.Module,
    storage: Storage,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    values: Mapping[str, Tensor] | None = None,
    largest_file: int = LARGEST_FILE,
) -> Callable[[], None]:
    """Copy the weights that this rank writes; every rank of the default process group calls it.

    Tensors are all-gathered one layer at a time, and each is kept by one rank, in balanced amounts.

    Args:
        model: a Hugging Face model with or without adapters; parameters are plain tensors or DTensors.
        values: to save instead of the parameters of these names, sharded like them.
        largest_file: maximum of bytes in a safetensors file, unless a single tensor is larger.

    Returns:
        A function that writes the files, in any thread and without communication.
    """
    return stage_layers(whole_layers(model, values or {}), model, storage, tokenizer, largest_file=largest_file)


def stage_layers(
    layers: Iterable[Mapping[str, Tensor]],
    model: nn.Module,
    storage: Storage,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    largest_file: int = LARGEST_FILE,
) -> Callable[[], None]:
    """Copy the tensors that this rank writes; every rank of the default process group calls it with the same tensors.
    See :func:`stage_weights`. ``layers``: whole tensors of one layer after the other, by their names in files.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    adapter = isinstance(model, PeftModel)
    layout = FileLayout("adapter_model" if adapter else "model", 1 if adapter else ranks, largest_file)
    kept: dict[str, Tensor] = {}
    for layer in layers:
        for name, tensor in layer.items():
            if layout.add(name, TensorSpec.from_tensor(tensor)) == rank:
                kept[name] = to_host(tensor)
        wait_for_copies(layer.values())
        activity.tick()
    small = Path(tempfile.mkdtemp(prefix="hone-model-")) if rank == 0 else None
    if small is not None:
        _write_settings(model, small)
        if tokenizer is not None:
            tokenizer.save_pretrained(small)
            _write_end_of_turn(model, tokenizer, small)

    def write() -> None:
        for file, specs in layout.files_of(rank).items():
            with storage.create(file) as stream:
                write_tensors(stream, specs, kept.__getitem__)
        if small is not None:
            if index := layout.index():
                (small / f"{layout.stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))
            storage.put(small)
            shutil.rmtree(small)

    return write


def _write_end_of_turn(model: nn.Module, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Add the token that ends a turn of the chat template to those at which generation of the saved model stops."""
    end = end_of_turn(tokenizer)
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    settings = getattr(inner, "generation_config", None)
    if end is None or settings is None:
        return
    ends = settings.eos_token_id
    ends = [*ends] if isinstance(ends, list) else [] if ends is None else [ends]
    if end not in ends:
        saved = copy.deepcopy(settings)
        saved.eos_token_id = [*ends, end]
        saved.save_pretrained(directory)


def whole_layers(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the whole tensors (or ``values``) of the model's checkpoint by their names in files, one layer at a time.

    Collective for DTensors: every rank iterates to the end. Tied weights come once. Weights that transformers fuses at
    loading (the experts of a layer) are split again.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(inner, PreTrainedModel)
    tensors = _saved_tensors(model, values)
    for names in _by_layer(tensors):
        whole = {name: _whole(tensors[name]) for name in names}
        yield whole if isinstance(model, PeftModel) else revert_weight_conversion(inner, whole)


def in_layers(named: Iterable[tuple[str, Tensor]], model: PreTrainedModel) -> Iterator[dict[str, Tensor]]:
    """Yield whole parameters, in the module's order, by their names in files, one layer at a time."""
    for _, layer in itertools.groupby(named, lambda pair: _layer_of(pair[0])):
        yield revert_weight_conversion(model, dict(layer))


class FileLayout:
    """Assignment of tensors to files and ranks; all ranks add the same tensors and get the same assignment."""

    def __init__(self, stem: str, ranks: int, largest_file: int = LARGEST_FILE) -> None:
        self.stem, self._largest = stem, largest_file
        self._loads = [0] * ranks
        self._files: list[list[dict[str, TensorSpec]]] = [[] for _ in range(ranks)]

    def add(self, name: str, spec: TensorSpec) -> int:
        """Add a tensor and return its rank, which is the one with the fewest bytes so far."""
        rank = self._loads.index(min(self._loads))
        self._loads[rank] += spec.size
        files = self._files[rank]
        if not files or sum(other.size for other in files[-1].values()) + spec.size > self._largest:
            files.append({})
        files[-1][name] = spec
        return rank

    def files_of(self, rank: int) -> dict[str, dict[str, TensorSpec]]:
        return {name: specs for name, (owner, specs) in self._named().items() if owner == rank}

    def index(self) -> dict[str, object] | None:
        """Return the content of ``*.safetensors.index.json``, None for a single file."""
        files = self._named()
        if len(files) == 1:
            return None
        weight_map = {name: file for file, (_, specs) in files.items() for name in specs}
        return {"metadata": {"total_size": sum(self._loads)}, "weight_map": weight_map}

    def _named(self) -> dict[str, tuple[int, dict[str, TensorSpec]]]:
        files = [(rank, specs) for rank, rank_files in enumerate(self._files) for specs in rank_files]
        if len(files) == 1:
            return {f"{self.stem}.safetensors": files[0]}
        total = len(files)
        return {f"{self.stem}-{i:05d}-of-{total:05d}.safetensors": file for i, file in enumerate(files, start=1)}


def _saved_tensors(model: nn.Module, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this process's tensors (or shards) of the model's checkpoint, with ``values`` in their places."""
    state = {**model.state_dict(), **values}
    if isinstance(model, PeftModel):
        return get_peft_model_state_dict(model, state_dict=state)
    repeated = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    repeated -= {name for name, _ in model.named_parameters()}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return {name: tensor for name, tensor in state.items() if name not in repeated and name not in ignored}


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    """Group names by their prefix up to the first number ("model.layers.3."); other names are separate groups."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(_layer_of(name), []).append(name)
    return list(layers.values())


def _layer_of(name: str) -> str:
    prefix = re.match(r".*?\.\d+\.", name)
    return prefix[0] if prefix else name


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):  # an offloaded shard is first copied to the device
        return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor().detach()
    return tensor.detach()


def _write_settings(model: nn.Module, directory: Path) -> None:
    """Write configuration, generation settings and code of the model, or the adapter's configuration."""
    if isinstance(model, PeftModel):
        settings, base = copy.deepcopy(model.peft_config[str(model.active_adapter)]), model.get_base_model()
        settings.base_model_name_or_path = settings.base_model_name_or_path or str(base.name_or_path) or None
        if settings.task_type is None:
            kind = type(base)
            settings.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        settings.inference_mode = True
        settings.save_pretrained(str(directory))
        write_record(model, directory)
        return
    assert isinstance(model, PreTrainedModel)
    config = copy.deepcopy(model.config)
    config.dtype = str(model.dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    if model.is_remote_code():
        custom_object_save(model, directory, config=cast(Any, config))  # annotated as a dict, used as a config
    config.save_pretrained(directory)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(directory)
    if (processor := find_processor(model)) is not None:
        copy_processor(processor.directory, directory)
