"""Columns on the way between processes, and in Ray's object store: arrays that are read in place, without a copy.

Tensors become numpy arrays, which Ray writes and maps directly. So do the token columns of episodes, which would otherwise be
lists of millions of numbers. Every other object is pickled; nothing comes from outside the run.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.cluster.remote_batch import RowInfo, Shard, Stored
from hone.data.batch import Batch, Column
from hone.data.images import IMAGES
from hone.data.ragged import Ragged
from hone.data.types import Sample, Trajectory

TOKENS = {
    "response_ids": np.int64, "response_mask": np.int64, "rollout_log_probs": np.float32, "sampling_log_probs": np.float32,
    "token_versions": np.int64, "support_sizes": np.int32, "support_ids": np.int32,
    "expert_ids": np.int16,
}  # fmt: skip
"""Fields of an episode with one number per token, and the type that represents it exactly."""


@dataclass(frozen=True)
class _Array:
    values: NDArray[Any]
    dtype: torch.dtype


@dataclass(frozen=True)
class _Rows:
    values: _Array
    offsets: NDArray[np.int64]


@dataclass(frozen=True)
class _Episodes:
    """Episodes field by field; those of one prompt share its sample."""

    samples: list[Sample]
    sample_of: list[int]
    tokens: dict[str, tuple[NDArray[Any], NDArray[np.int64]]]
    others: dict[str, list[Any]]


Encoded = _Array | _Rows | _Episodes | list


def encode(columns: Mapping[str, Column]) -> dict[str, Encoded]:
    """Convert columns for the object store."""
    return {name: _encoded(column) for name, column in columns.items()}


def decode(columns: Mapping[str, Encoded]) -> dict[str, Column]:
    """Restore the columns of :func:`encode`; tensors share the memory of the object store and are read only."""
    return {name: _decoded(column) for name, column in columns.items()}


def encode_named(tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, _Array]]:
    """Convert named tensors for the object store."""
    return [(name, _array(tensor)) for name, tensor in tensors]


def decode_named(tensors: Sequence[tuple[str, _Array]]) -> list[tuple[str, Tensor]]:
    """Restore the tensors of :func:`encode_named`; they share the memory of the object store and are read only."""
    return [(name, _tensor(array)) for name, array in tensors]


def stored(batch: Batch, put: Callable[[Any], Any]) -> Stored:
    """Store a batch: tensors in one object, Python objects in another, images in a third; ``uid`` goes to the driver.

    A worker with a model needs tensors and images, and fetches only them. An image that several rows share is stored once.

    Args:
        batch: the batch.
        put: stores an object and returns its reference.
    """
    tensors = tuple(name for name in batch.names() if not isinstance(batch[name], list))
    objects = tuple(name for name in batch.names() if isinstance(batch[name], list) and name not in ("uid", IMAGES))
    images = (IMAGES,) if IMAGES in batch else ()
    names_rows = "uid" in batch and "prompt_ids" in batch

    def block(names: Sequence[str]) -> Any:
        return put(encode({name: batch[name] for name in names})) if names else None

    return Stored(
        (tensors, objects, images),
        (block(tensors), block(objects), block(images)),
        len(batch),
        RowInfo.from_batch(batch) if names_rows else None,
        batch.meta,
    )


def assembled(shard: Shard, get: Callable[[list[Any]], list[Any]]) -> Batch:
    """Return the batch of a shard.

    Args:
        shard: the rows.
        get: returns the objects of references of :func:`stored`.
    """
    columns: dict[str, Any] = {}
    for layer in shard.layers:
        columns |= layer.columns([decode(block) for block in get([block.ref for block in layer.blocks])])
    return Batch({**columns, "uid": shard.uids}, **shard.meta)


def _encoded(column: Column) -> Encoded:
    if isinstance(column, Ragged):
        return _Rows(_array(column.values), column.offsets.numpy())
    if isinstance(column, Tensor):
        return _array(column)
    if column and all(type(item) is Trajectory for item in column):
        return _episodes(column)
    return column


def _decoded(column: Encoded) -> Column:
    if isinstance(column, _Rows):
        return Ragged(_tensor(column.values), _tensor(_Array(column.offsets, torch.int64)))
    if isinstance(column, _Array):
        return _tensor(column)
    return _trajectories(column) if isinstance(column, _Episodes) else column


def _array(tensor: Tensor) -> _Array:
    plain = tensor.detach().cpu().contiguous()
    return _Array((plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy(), tensor.dtype)


def _tensor(array: _Array) -> Tensor:
    with warnings.catch_warnings():  # torch warns about read-only arrays; columns are never written
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        tensor = torch.from_numpy(array.values)
    return tensor if tensor.dtype == array.dtype else tensor.view(array.dtype)


def _episodes(trajectories: Sequence[Trajectory]) -> _Episodes:
    numbers: dict[int, int] = {}
    samples: list[Sample] = []
    for trajectory in trajectories:
        if numbers.setdefault(id(trajectory.sample), len(samples)) == len(samples):
            samples.append(trajectory.sample)
    tokens = {name: _flat([getattr(t, name) for t in trajectories], dtype) for name, dtype in TOKENS.items()}
    others = {
        field.name: [getattr(trajectory, field.name) for trajectory in trajectories]
        for field in dataclasses.fields(Trajectory)
        if field.name not in TOKENS and field.name != "sample"
    }
    return _Episodes(samples, [numbers[id(trajectory.sample)] for trajectory in trajectories], tokens, others)


def _trajectories(episodes: _Episodes) -> list[Trajectory]:
    rows = {name: _views(*flat) for name, flat in episodes.tokens.items()}
    return [
        Trajectory(
            sample=episodes.samples[number],
            **{name: views[row] for name, views in rows.items()},
            **{name: values[row] for name, values in episodes.others.items()},
        )
        for row, number in enumerate(episodes.sample_of)
    ]


def _flat(rows: Sequence[Any], dtype: Any) -> tuple[NDArray[Any], NDArray[np.int64]]:
    offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int64)
    arrays = [np.asarray(row, dtype) for row in rows]
    return np.concatenate(arrays) if arrays else np.empty(0, dtype), offsets


def _views(values: NDArray[Any], offsets: NDArray[np.int64]) -> list[Any]:
    """Return a view of each row, which can be indexed, sliced and iterated like a list of numbers."""
    view, bounds = memoryview(values), offsets.tolist()  # type: ignore[arg-type]
    return [view[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
