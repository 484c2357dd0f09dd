"""Build models without storage, and fill them from safetensors files one parameter at a time.

A process that holds a part of a model never needs memory for all of it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hone.errors import ModelError
from hone.models.four_bits import packed_layers


class WeightFiles:
    """The safetensors files of a Hugging Face directory, read as the parameters of ``model``.

    Files may name and split weights differently from the module (one matrix an expert, for example). transformers' table of
    conversions is applied, and the tensors of one parameter are read at a time.

    ``model`` is as transformers builds it, before adapters; storage is not needed. ModelError without safetensors files.
    """

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        self.files = _files(directory)
        self.config = model.config
        self._quantisation = getattr(self.config, "quantization_config", None)
        self._readers: dict[Path, Any] = {}
        transforms = get_model_conversion_mapping(model)
        renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        known = model.state_dict()
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        self._converters: dict[str, WeightConverter] = {}
        scales = ("_scale_inv", "_scales", "activation_scale") if self._quantisation else ()
        names = {key.removesuffix("_blocks") if scales else key for key in self.files if not key.endswith(scales)}
        for key in sorted(names, key=_natural):
            target, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
            self._sources.setdefault(target, []).append((key, pattern))
            if pattern is not None:
                self._converters[target] = by_pattern[pattern]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameter names of the module with their values, one at a time."""
        for target, sources in self._sources.items():
            if target not in self._converters:
                yield target, self._read(sources[0][0])
                continue
            converter = copy.deepcopy(self._converters[target])
            for key, pattern in sources:
                converter.add_tensor(target, key, str(pattern), self._read(key))  # type: ignore[arg-type]
            for name, value in converter.convert(target, config=self.config).items():
                yield name, value[0] if isinstance(value, list) else value

    def read(self, *names: str) -> Tensor:
        """Return one parameter, by the first of its names in the module that the files have; ModelError without any."""
        target = next((name for name in names if name in self._sources and name not in self._converters), None)
        if target is None:
            raise ModelError(
                f"the files lack '{names[0]}'",
                where="model.path",
                fix="check that the directory holds config.json and *.safetensors of one model",
            )
        return self._read(self._sources[target][0][0])

    def check_shapes(self, model: PreTrainedModel) -> None:
        """Compare the headers of the files with the module's parameters, before these get storage; ModelError if one differs."""
        for name, value in model.state_dict().items():
            if name in self._sources and name not in self._converters:
                key = self._sources[name][0][0]
                saved, built = self._reader(key).get_slice(key).get_shape(), list(value.shape)
                if saved != built:
                    raise ModelError(
                        f"'{name}' is {saved} in '{self.files[key]}', and {built} by config.json",
                        why="config.json and weights are not of one model",
                        where="model.path",
                        fix="restore both from where the model was published",
                    )

    def _read(self, key: str) -> Tensor:
        """Return one tensor, in float32 if the files hold it in blocks with a scale each."""
        if self._quantisation and f"{key}_blocks" in self.files:
            blocks, scales = (self._stored(f"{key}_{part}") for part in ("blocks", "scales"))
            return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        if self._quantisation and f"{key}_scale_inv" in self.files:
            values = self._stored(key)
            size = self._quantisation.get("weight_block_size") or values.shape[-2:]
            return dequantised(values, self._stored(f"{key}_scale_inv"), size)
        values = self._stored(key)
        if values.dtype.itemsize == 1:
            raise ModelError(
                f"'{key}' in '{self.files[key]}' is {values.dtype}, and there is no '{key}_scale_inv'",
                why="without their scales the values are others",
                where="model.path",
                fix="the directory or name of the unquantised model",
            )
        return values

    def _stored(self, key: str) -> Tensor:
        return self._reader(key).get_tensor(key)

    def _reader(self, key: str) -> Any:
        file = self.files[key]
        if file not in self._readers:
            self._readers[file] = safe_open(file, framework="pt")
        return self._readers[file]


def dequantised(values: Tensor, scales: Tensor, size: Sequence[int]) -> Tensor:
    """Multiply each block of ``size [rows, columns]`` of the matrices by its scale; the last blocks may be smaller."""
    grid = [-(-length // block) for length, block in zip(values.shape[-2:], size, strict=True)]
    scales = scales.float().reshape(*values.shape[:-2], *grid)
    for dim in (-2, -1):
        scales = scales.repeat_interleave(size[dim], dim).narrow(dim, 0, values.shape[dim])
    return values.float() * scales


def empty_model(factory: Any, settings: Any, *, trust_remote_code: bool) -> PreTrainedModel:
    """Build the model of a transformers config with parameters on the meta device; compute buffers, which no file holds."""
    with torch.device("meta"):
        model = factory.from_config(
            settings, dtype=torch.float32, attn_implementation="eager", trust_remote_code=trust_remote_code
        )
    places = {
        (path, name): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta
    }
    for (path, name), buffer in places.items():
        unknown = torch.empty_like(buffer, device="cpu")
        model.get_submodule(path)._buffers[name] = unknown.fill_(math.nan) if buffer.is_floating_point() else unknown
    owners = {
        part: owner for owner in model.modules() if isinstance(owner, PreTrainedModel) for part in owner.modules()
    }
    holders = {path[:end] for path, _ in places for end in _ends(path)}
    with torch.no_grad():
        for path in sorted(holders, key=len, reverse=True):  # a module may compute the buffers of those within it
            module = model.get_submodule(path)
            owners[module]._init_weights(module)
    for path, name in places:
        module = model.get_submodule(path)
        if name in module._non_persistent_buffers_set and _unknown(module._buffers[name]):
            raise ModelError(
                f"{type(model).__name__} does not compute its buffer {path}.{name} without the weights",
                why="no file holds it, so a sharded model would begin with other values",
                where="strategy",
                fix="strategy=local",
            )
    return model


def _unknown(buffer: Tensor | None) -> bool:
    """Return whether neither the model's code nor a file has given a buffer of :func:`empty_model` its values."""
    return buffer is not None and bool(buffer.isnan().any())


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that files hold; those of packed layers are made of their matrices."""
    packed = {layer for _, layer in packed_layers(model)}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set and module not in packed:
                yield f"{path}.{name}".lstrip("."), buffer


def _ends(path: str) -> list[int]:
    """Return the lengths of the paths of a module and of all modules around it."""
    return [0, *(place for place, letter in enumerate(path) if letter == "."), len(path)]


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Replace meta parameters within the block by CPU tensors without memory, so that adapters added there get storage."""
    originals = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                stand_in = nn.Parameter(torch.zeros(()).expand(parameter.shape), requires_grad=parameter.requires_grad)
                originals.append((module, name, parameter, stand_in))
                module._parameters[name] = stand_in
    try:
        yield
    finally:
        for module, name, parameter, stand_in in originals:
            module._parameters[name] = parameter.requires_grad_(stand_in.requires_grad)


def materialise(model: nn.Module, device: torch.device) -> None:
    """Give every meta parameter storage for its local part; tied parameters stay tied."""
    created: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in created:
                created[id(parameter)] = nn.Parameter(
                    torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad
                )
            module._parameters[name] = created[id(parameter)]


@torch.no_grad()
def fill(model: nn.Module, files: WeightFiles, *, fresh: tuple[str, ...] = ()) -> None:
    """Copy this rank's part of the files into every parameter, and into the buffers that files hold (the bias of a router).

    Parameters with a prefix in ``fresh`` become zero if no file has them.

    Raises:
        ModelError: parameters are missing in the files, or have another shape.
    """
    parameters = {
        name.replace(".base_layer.", "."): value
        for name, value in (*model.named_parameters(), *_saved_buffers(model))
        if ".lora_" not in name
    }
    packed = {f"{name}.weight": layer for name, layer in packed_layers(model)}
    computed = {
        name for name, value in parameters.items() if not isinstance(value, nn.Parameter) and not _unknown(value)
    }
    waiting = parameters.keys() - computed
    for name, value in files.tensors():
        parameter = parameters.get(name)
        if parameter is None:
            continue
        if name in packed:
            packed[name].pack(value)
            waiting.discard(name)
            continue
        if parameter.shape != value.shape:
            raise ModelError(
                f"'{name}' has shape {list(value.shape)} in the files and {list(parameter.shape)} in the model",
                where="model.path",
                fix="check that the directory holds config.json and *.safetensors of one model",
            )
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.copy_(local_part(value, parameter))
        waiting.discard(name)
    for name in [name for name in waiting if name.startswith(fresh)]:
        parameters[name].zero_()
        waiting.discard(name)
    if waiting:
        raise ModelError(
            f"the weights lack {len(waiting)} tensors, {min(waiting)} among them",
            why="they would be random",
            where="model.path",
            fix="check that the directory holds config.json and *.safetensors of one model",
        )


def local_part(full: Tensor, parameter: Tensor) -> Tensor:
    """The part of ``full`` that this rank holds of ``parameter``; needs no communication.

    The innermost dimension of the mesh is split first: FSDP shards what tensor or expert parallelism leaves.
    """
    if not isinstance(parameter, DTensor):
        return full
    mesh = parameter.device_mesh
    for dimension in reversed(range(mesh.ndim)):
        dim = sharded_dim(parameter, dimension)
        if dim is not None:
            start, length = piece(full.shape[dim], mesh.size(dimension), mesh.get_local_rank(dimension))
            full = full.narrow(dim, start, length)
    return full


def sharded_dim(parameter: DTensor, dimension: int) -> int | None:
    """Tensor dimension that is split over ``dimension`` of the mesh, or None if each rank there has a copy."""
    return getattr(parameter.placements[dimension], "dim", None)  # of a shard, plain or strided


def piece(size: int, pieces: int, place: int) -> tuple[int, int]:
    """Start and length of part ``place`` if ``size`` is split into ``pieces``; the last parts may be short or empty."""
    length = -(-size // pieces)
    start = min(length * place, size)
    return start, min(length, size - start)


def _files(directory: Path) -> dict[str, Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ModelError(
            f"'{directory}' holds no model.safetensors",
            why="a model that is divided over processes is read tensor by tensor, which only safetensors files allow",
            where="model.path",
            fix="save it with transformers' save_pretrained",
        )
    with safe_open(single, framework="pt") as reader:
        return dict.fromkeys(reader.keys(), single)


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that orders ``experts.2`` before ``experts.10``."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name)]
