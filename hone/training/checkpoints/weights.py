"""Weights of a model of any layout as a Hugging Face directory, or a PEFT directory when it has adapters."""

from __future__ import annotations

import copy
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save

from hone.insight import activity
from hone.training.checkpoints.shards import settle, to_host
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.tensor_files import TensorSpec, write_tensors

LARGEST_FILE = 5 * 10**9  # bytes; what transformers and the hub are used to


def stage_weights(
    model: nn.Module,
    storage: Storage,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    largest_file: int = LARGEST_FILE,
) -> Callable[[], None]:
    """Copy the weights that this rank is to write; every rank of the default process group calls it.

    Tensors are gathered whole, a layer at a time, and each is kept by one rank, so that all hold about the same.

    Args:
        model: of Hugging Face, with adapters or without, its parameters plain or DTensors.
        storage: the directory that the model goes to.
        tokenizer: saved beside it.
        largest_file: bytes of one safetensors file, unless a single tensor is larger.

    Returns:
        The writing, to be called from any thread; it talks to no other rank.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    adapter = isinstance(model, PeftModel)
    shelf = Shelf("adapter_model" if adapter else "model", 1 if adapter else ranks, largest_file)
    kept: dict[str, Tensor] = {}
    for layer in whole_layers(model):
        for name, tensor in layer.items():
            if shelf.place(name, TensorSpec.of(tensor)) == rank:
                kept[name] = to_host(tensor)
        settle(layer.values())
        activity.tick()
    small = Path(tempfile.mkdtemp(prefix="hone-model-")) if rank == 0 else None
    if small is not None:
        _write_settings(model, small)
        if tokenizer is not None:
            tokenizer.save_pretrained(small)

    def write() -> None:
        for file, specs in shelf.files_of(rank).items():
            with storage.create(file) as stream:
                write_tensors(stream, specs, kept.__getitem__)
        if small is not None:
            if index := shelf.index():
                (small / f"{shelf.stem}.safetensors.index.json").write_text(json.dumps(index, indent=1))
            storage.put(small)
            shutil.rmtree(small)

    return write


def whole_layers(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The tensors that a checkpoint of the model holds, whole and by the names of its files, one layer after another.

    Collective when parameters are DTensors: every rank iterates to the end. Tied weights come once. What transformers
    fuses when it loads a model (the experts of a layer) is taken apart again.
    """
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    assert isinstance(inner, PreTrainedModel)
    for names in _by_layer(tensors := _saved_tensors(model)):
        whole = {name: _whole(tensors[name]) for name in names}
        yield whole if isinstance(model, PeftModel) else revert_weight_conversion(inner, whole)


class Shelf:
    """Which tensor goes into which file, and which rank writes it. All ranks place the same tensors and so agree.

    Args:
        stem: beginning of the files' names ("model").
        ranks: how many share the writing.
        largest_file: bytes.
    """

    def __init__(self, stem: str, ranks: int, largest_file: int = LARGEST_FILE) -> None:
        self.stem, self._largest = stem, largest_file
        self._loads = [0] * ranks
        self._files: list[list[dict[str, TensorSpec]]] = [[] for _ in range(ranks)]

    def place(self, name: str, spec: TensorSpec) -> int:
        """The rank that keeps this tensor: the one with the least so far."""
        rank = self._loads.index(min(self._loads))
        self._loads[rank] += spec.size
        files = self._files[rank]
        if not files or sum(other.size for other in files[-1].values()) + spec.size > self._largest:
            files.append({})
        files[-1][name] = spec
        return rank

    def files_of(self, rank: int) -> dict[str, dict[str, TensorSpec]]:
        """The files that a rank writes, with what goes into them."""
        return {name: specs for name, (owner, specs) in self._named().items() if owner == rank}

    def index(self) -> dict[str, object] | None:
        """The content of ``*.safetensors.index.json``, None when there is a single file."""
        files = self._named()
        if len(files) == 1:
            return None
        weight_map = {name: file for file, (_, specs) in files.items() for name in specs}
        return {"metadata": {"total_size": sum(self._loads)}, "weight_map": weight_map}

    def _named(self) -> dict[str, tuple[int, dict[str, TensorSpec]]]:
        files = [(rank, specs) for rank, own in enumerate(self._files) for specs in own]
        if len(files) == 1:
            return {f"{self.stem}.safetensors": files[0]}
        total = len(files)
        return {f"{self.stem}-{i:05d}-of-{total:05d}.safetensors": file for i, file in enumerate(files, start=1)}


def _saved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint of the model holds, as it lies in this process."""
    state = model.state_dict()
    if isinstance(model, PeftModel):
        return get_peft_model_state_dict(model, state_dict=state)
    repeated = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    repeated -= {name for name, _ in model.named_parameters()}
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    return {name: tensor for name, tensor in state.items() if name not in repeated and name not in ignored}


def _by_layer(names: Iterable[str]) -> list[list[str]]:
    """Names that share their beginning up to the first number ("model.layers.3."), each other name alone."""
    layers: dict[str, list[str]] = {}
    for name in names:
        found = re.match(r".*?\.\d+\.", name)
        layers.setdefault(found[0] if found else name, []).append(name)
    return list(layers.values())


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):  # an offloaded shard travels between devices
        return cast(DTensor, tensor.to(tensor.device_mesh.device_type)).full_tensor().detach()
    return tensor.detach()


def _write_settings(model: nn.Module, directory: Path) -> None:
    """Configuration, generation settings and code of the model, or the adapter's configuration."""
    if isinstance(model, PeftModel):
        settings, base = copy.deepcopy(model.peft_config[str(model.active_adapter)]), model.get_base_model()
        settings.base_model_name_or_path = settings.base_model_name_or_path or str(base.name_or_path) or None
        if settings.task_type is None:
            kind = type(base)
            settings.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
        settings.inference_mode = True
        settings.save_pretrained(str(directory))
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
