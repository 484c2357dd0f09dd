"""Sharded state: each rank writes its chunks of tensors, and a run with any layout reads the chunks that it needs.

The planners of ``torch.distributed.checkpoint`` decide which rank writes and reads which chunks. The file format is Hone's,
because the library's files are unpickled when they are read:

    rank_<R>.safetensors    chunks that rank R wrote (torch's HuggingFaceStorageReader can read them)
    index.json              for every tensor: dtype, shape, and its chunks with file and offsets; and the plain values
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from hone.errors import CheckpointError
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.tensor_files import DTYPES, TensorFile, TensorSpec, write_tensors

INDEX = "index.json"
Values = dict[str, Any]


def shard_file(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


class ShardStager:
    """Copies state, so that it can be written while training changes it.

    Ranks agree once on the chunks that each writes; while the names stay the same, staging needs no communication.
    """

    def __init__(self) -> None:
        self._names: list[str] | None = None  # before the first agreement
        self._plan = SavePlan([])
        self._index: dict[str, Any] = {}

    def stage(self, tensors: Mapping[str, Tensor], values: Values, storage: Storage) -> Callable[[], None]:
        """Copy the data that this rank writes; every rank of the default process group calls it.

        Args:
            tensors: by name; DTensors, and plain tensors that are equal on all ranks.
            values: plain values for the index, equal on all ranks.

        Returns:
            A function that writes the files, in any thread and without communication.
        """
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(tensors), is_coordinator=dist_rank() == 0)
        if self._names != list(tensors):
            self._agree(planner)
            self._names = list(tensors)
        chunks: dict[str, Tensor] = {}
        for item in self._plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor)
            chunks[item.index.fqn] = to_host(data)
        wait_for_copies(tensors.values())
        offsets = {item.index.fqn: list(_chunk(item).offsets) for item in self._plan.items}
        return _writer(storage, chunks, offsets, {**self._index, "values": values})

    def _agree(self, planner: DefaultSavePlanner) -> None:
        """Distribute the chunks over the ranks: each is written once, even if several ranks have it."""
        local = planner.create_local_plan()
        local = replace(local, items=[item for item in local.items if 0 not in _chunk(item).sizes])
        if _world() == 1:
            plans, _ = planner.create_global_plan([local])
            mine = plans[0]
        else:
            gathered: list[Any] = [None] * _world()
            dist.gather_object(local, gathered if dist_rank() == 0 else None)
            plans = planner.create_global_plan(gathered)[0] if dist_rank() == 0 else []
            received: list[Any] = [None]
            dist.scatter_object_list(received, list(plans) if dist_rank() == 0 else None)
            mine = received[0]
        self._plan = planner.finish_plan(mine)
        if dist_rank() == 0:
            self._index = {"tensors": _index(plans)}


def stage_whole(named: Iterable[tuple[str, Tensor]], values: Values, storage: Storage) -> Callable[[], None]:
    """Copy the tensors that this rank writes, of a stream of whole tensors; every rank of the default process group calls it.

    Args:
        named: the same names and tensors on all ranks; each tensor is kept by one of them, in balanced amounts.
        values: plain values for the index, equal on all ranks.

    Returns:
        A function that writes the files, in any thread and without communication.
    """
    rank, loads = dist_rank(), [0] * _world()
    kept: dict[str, Tensor] = {}
    index: dict[str, Any] = {}
    for name, tensor in named:
        spec = TensorSpec.from_tensor(tensor)
        owner = loads.index(min(loads))
        loads[owner] += spec.size
        place = [shard_file(owner), [0] * len(spec.shape), list(spec.shape)]
        index[name] = {"dtype": DTYPES[spec.dtype], "shape": list(spec.shape), "pieces": [place]}
        if owner == rank:
            kept[name] = to_host(tensor)
    wait_for_copies(kept.values())
    offsets = {name: [0] * tensor.dim() for name, tensor in kept.items()}
    return _writer(storage, kept, offsets, {"tensors": index, "values": values})


def _writer(
    storage: Storage, chunks: Mapping[str, Tensor], offsets: Mapping[str, list[int]], index: Mapping[str, Any]
) -> Callable[[], None]:
    """Return a function that writes this rank's chunks, and on the first rank the index as it is now."""
    name, text = shard_file(dist_rank()), json.dumps(index) if dist_rank() == 0 else None
    places = {key: {"saved_offsets": offset} for key, offset in offsets.items()}

    def write() -> None:
        if chunks:
            specs = {key: TensorSpec.from_tensor(chunk) for key, chunk in chunks.items()}
            with storage.create(name) as file:
                write_tensors(file, specs, chunks.__getitem__, {"DCP_SHARDING_INFO": json.dumps(places)})
        if text is not None:
            storage.write_text(INDEX, text)

    return write


def load_shards(tensors: Mapping[str, Tensor], storage: Storage, index: ShardIndex | None = None) -> None:
    """Load ``tensors`` in place by their names, from any layout and without communication.

    Raises CheckpointError: a tensor is missing or has another shape, or the files are damaged.
    """
    index = index or read_index(storage)
    missing = [name for name in tensors if name not in index.tensors]
    if missing:
        raise CheckpointError(
            f"'{storage}' lacks {len(missing)} of {len(tensors)} tensors, such as {missing[0]}",
            why="it was saved for another model or other trained parameters",
        )
    for name, tensor in tensors.items():
        if (saved := index.tensors[name]).shape != tuple(tensor.shape):
            raise CheckpointError(
                f"'{storage}' has {name} with shape {list(saved.shape)}, but this run has {list(tensor.shape)}",
                why="it was saved for another model",
            )
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), index.as_metadata(), is_coordinator=True)
    plan = planner.finish_plan(planner.create_local_plan())
    wanted: dict[str, list[Any]] = {}
    for item in plan.items:
        place = (item.storage_index.fqn, tuple(item.storage_index.offset or ()))
        wanted.setdefault(index.files[place], []).append(item)
    for name, items in wanted.items():
        with storage.open(name) as file:
            saved = TensorFile(file, f"{storage}/{name}")
            for item in items:
                target = planner.resolve_tensor(item).detach()
                target.copy_(saved.read(item.storage_index.fqn, item.storage_offsets, item.lengths))


@dataclass(frozen=True)
class ShardIndex:
    """Contents of ``index.json``."""

    tensors: dict[str, TensorSpec]  # dtype and whole shape of each
    chunks: dict[str, list[ChunkStorageMetadata]]  # offsets and sizes, by tensor
    files: dict[tuple[str, tuple[int, ...]], str]  # of each chunk, by tensor name and offsets
    values: Values  # the plain values

    def as_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(TensorProperties(spec.dtype), torch.Size(spec.shape), self.chunks[name])
                for name, spec in self.tensors.items()
            }
        )


def read_index(storage: Storage) -> ShardIndex:
    """Read the index of a saved state. Raises CheckpointError: there is no index, or it is damaged."""
    try:
        content = json.loads(storage.read_text(INDEX))
        tensors: dict[str, TensorSpec] = {}
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        files: dict[tuple[str, tuple[int, ...]], str] = {}
        for name, about in content["tensors"].items():
            tensors[name] = TensorSpec.named(about["dtype"], about["shape"])
            for file, offsets, sizes in about["pieces"]:
                chunks.setdefault(name, []).append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                files[name, tuple(offsets)] = file
        return ShardIndex(tensors, chunks, files, content["values"])
    except FileNotFoundError as error:
        raise CheckpointError(f"'{storage}' has no saved state: {INDEX} is missing") from error
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"'{storage}/{INDEX}' is damaged: {type(error).__name__}: {error}") from error


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in host memory; from a GPU it is complete only after :func:`wait_for_copies`."""
    if tensor.device.type == "cuda":
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach(), non_blocking=True)
    return tensor.detach().to("cpu", copy=True).contiguous()


def wait_for_copies(tensors: Iterable[Tensor]) -> None:
    if any(tensor.device.type == "cuda" for tensor in tensors):
        torch.cuda.synchronize()


def _index(plans: list[SavePlan]) -> dict[str, Any]:
    tensors: dict[str, Any] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data, chunk = item.tensor_data, _chunk(item)
            assert data is not None
            about = tensors.setdefault(
                item.index.fqn, {"dtype": DTYPES[data.properties.dtype], "shape": list(data.size), "pieces": []}
            )
            about["pieces"].append([shard_file(rank), list(chunk.offsets), list(chunk.sizes)])
    return tensors


def _chunk(item: WriteItem) -> ChunkStorageMetadata:
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def dist_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
