"""The one protocol between stages: a batch of sequences as named columns; and the columns of episodes, with which a step begins."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hone.data.images import images_column
from hone.data.ragged import Ragged
from hone.data.types import Trajectory
from hone.errors import CheckpointError

Column = Tensor | Ragged | list


class Batch:
    """Named columns of equal length ``B``, and metadata of the whole batch.

    A column is a dense tensor ``[B, ...]``, a :class:`Ragged` (token columns without padding), or a list of ``B`` Python objects.
    Operations return new batches and share storage where possible; columns are never changed in place. All but :meth:`union`
    and :meth:`concat` keep the metadata unchanged.

    >>> batch = Batch({"response_ids": Ragged.from_rows([[5, 6], [7]]), "uid": ["a", "b"]}, step=3)
    >>> len(batch), batch.meta
    (2, {'step': 3})
    >>> batch.reorder([1, 0])["uid"]
    ['b', 'a']

    Raises:
        ValueError: columns differ in length.
    """

    def __init__(self, columns: Mapping[str, Column], **meta: Any) -> None:
        self._columns: dict[str, Column] = dict(columns)
        self.meta: dict[str, Any] = meta
        sizes = {name: len(column) for name, column in self._columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns differ in length: {sizes}")
        self._size = next(iter(sizes.values()), 0)

    # access ----------------------------------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Column:
        try:
            return self._columns[name]
        except KeyError:
            raise KeyError(f"the batch has no column '{name}'; it has {sorted(self._columns)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def names(self) -> list[str]:
        return list(self._columns)

    def __len__(self) -> int:
        """Return the number of rows ``B`` (not of columns)."""
        return self._size

    @property
    def uids(self) -> list[str]:
        """Return column ``uid``: the prompt group of each row."""
        return self.objects("uid")

    def ragged(self, name: str) -> Ragged:
        column = self[name]
        if not isinstance(column, Ragged):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not ragged")
        return column

    def tensor(self, name: str) -> Tensor:
        column = self[name]
        if not isinstance(column, Tensor):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not a tensor")
        return column

    def objects(self, name: str) -> list:
        column = self[name]
        if not isinstance(column, list):
            raise TypeError(f"column '{name}' is a {type(column).__name__}, not a list")
        return column

    # columns ---------------------------------------------------------------------------------------------------------

    def with_columns(self, **columns: Column) -> Batch:
        return Batch({**self._columns, **columns}, **self.meta)

    def select(self, *names: str) -> Batch:
        return Batch({name: self[name] for name in names}, **self.meta)

    def rename(self, names: Mapping[str, str]) -> Batch:
        """Rename columns, ``{old: new}``; other columns keep their names.

        Raises:
            KeyError: no column has an old name.
            ValueError: two columns would get the same name.
        """
        for old in names:
            self[old]
        renamed = [names.get(name, name) for name in self._columns]
        twice = sorted({name for name in renamed if renamed.count(name) > 1})
        if twice:
            raise ValueError(f"renaming gives two columns the name {', '.join(twice)}")
        return Batch(dict(zip(renamed, self._columns.values(), strict=True)), **self.meta)

    def union(self, other: Batch) -> Batch:
        """Combine the columns and metadata of both batches, row by row.

        Raises ValueError: the lengths differ, or both have different values under one name.
        """
        if self._columns and other._columns and len(self) != len(other):
            raise ValueError(f"union of a batch of {len(self)} rows with one of {len(other)}")
        for name in other.names():
            if name in self and not same_column(self[name], other[name]):
                raise ValueError(f"both batches have a column '{name}', and they differ")
        return Batch({**other._columns, **self._columns}, **_merged([self.meta, other.meta]))

    def updated(self, other: Batch) -> Batch:
        """Combine the columns and metadata of both batches; ``other`` wins where both have one."""
        return Batch({**self._columns, **other._columns}, **{**self.meta, **other.meta})

    def to(self, device: torch.device | str) -> Batch:
        """Move tensors to another device; offsets of ragged columns and Python objects stay in place."""
        moved = {name: c if isinstance(c, list) else c.to(device) for name, c in self._columns.items()}
        return Batch(moved, **self.meta)

    # rows ------------------------------------------------------------------------------------------------------------

    def reorder(self, rows: Sequence[int] | Tensor) -> Batch:
        """Return the given rows in the given order; subsets and repeats are allowed."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        if len(index) and not (int(index.min()) > -1 and int(index.max()) < len(self)):
            raise IndexError(f"rows run from {int(index.min())} to {int(index.max())}, the batch has {len(self)}")
        return Batch({name: _take(column, index) for name, column in self._columns.items()}, **self.meta)

    def slice(self, start: int, stop: int) -> Batch:
        """Return rows ``start`` to ``stop`` (exclusive), sharing storage.

        Raises IndexError: not ``0 <= start <= stop <= B``.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start} to {stop} of a batch of {len(self)}")
        cut = {n: c.slice(start, stop) if isinstance(c, Ragged) else c[start:stop] for n, c in self._columns.items()}
        return Batch(cut, **self.meta)

    def split(self, size: int) -> list[Batch]:
        """Split into consecutive batches of ``size`` rows; the last one has the remainder."""
        if size < 1:
            raise ValueError(f"split into batches of {size} rows")
        return [self.slice(start, min(start + size, len(self))) for start in range(0, len(self), size)]

    def chunk(self, parts: int) -> list[Batch]:
        """Split into exactly ``parts`` consecutive batches; sizes differ by at most one, larger ones first (some may be empty)."""
        if parts < 1:
            raise ValueError(f"chunk into {parts} parts")
        share, extra = divmod(len(self), parts)
        starts = [part * share + min(part, extra) for part in range(parts + 1)]
        return [self.slice(a, b) for a, b in zip(starts, starts[1:], strict=False)]

    def repeat(self, times: int, *, interleave: bool = True) -> Batch:
        """Repeat every row ``times`` times: ``a a b b`` when interleaved, else ``a b a b``."""
        if times < 0:
            raise ValueError(f"repeat {times} times")
        rows = torch.arange(len(self))
        return self.reorder(rows.repeat_interleave(times) if interleave else rows.repeat(times))

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Concatenate the rows of all parts, in order.

        Raises ValueError: there is no part; the parts differ in the names, kinds or shapes of their columns; or their
        metadata have different values for a key.
        """
        if not parts:
            raise ValueError("concat of no batch")
        names = parts[0].names()
        for part in parts:
            if set(part.names()) != set(names):
                raise ValueError(f"batches differ in their columns: {sorted(names)} and {sorted(part.names())}")
        columns = {name: _concat_column(name, [part[name] for part in parts]) for name in names}
        return Batch(columns, **_merged([part.meta for part in parts]))

    # files -----------------------------------------------------------------------------------------------------------

    def save(self, directory: str | Path) -> None:
        """Write ``tensors.safetensors``, and Python objects and metadata to ``batch.json``; nothing is pickled.

        Raises:
            TypeError: an object or metadata value that JSON cannot hold exactly.
            CheckpointError: the directory cannot be written.
        """
        _write(self._columns, self.meta, Path(directory))

    @staticmethod
    def load(directory: str | Path) -> Batch:
        """Read what :meth:`save` wrote. Raises CheckpointError: the directory has no batch, or it is damaged."""
        columns, meta = _read(Path(directory))
        return Batch(columns, **meta)

    def __iter__(self) -> Iterator[str]:
        raise TypeError("a batch is not iterable: use names() for its columns, split(1) for its rows")


def same_column(one: Column, other: Column) -> bool:
    """Return whether two columns have the same kind and the same values, bit for bit (NaN equals NaN)."""
    if isinstance(one, Ragged) and isinstance(other, Ragged):
        return torch.equal(one.offsets, other.offsets) and same_column(one.values, other.values)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape and one.device == other.device
        return alike and bool(((one == other) | ((one != one) & (other != other))).all())
    return isinstance(one, list) and isinstance(other, list) and one == other


def _concat_column(name: str, parts: list[Column]) -> Column:
    first = parts[0]
    for part in parts:
        if type(part) is not type(first) or _row_shape(part) != _row_shape(first):
            raise ValueError(f"column '{name}' differs between the batches: {_kind(first)} and {_kind(part)}")
    if isinstance(first, Ragged):
        return Ragged.concat([part for part in parts if isinstance(part, Ragged)])
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    return [value for part in parts if isinstance(part, list) for value in part]


def _row_shape(column: Column) -> tuple[torch.dtype, torch.Size] | None:
    if isinstance(column, list):
        return None
    values = column.values if isinstance(column, Ragged) else column
    return values.dtype, values.shape[1:]


def _kind(column: Column) -> str:
    shape = _row_shape(column)
    return type(column).__name__ if shape is None else f"{type(column).__name__} {shape[0]} {list(shape[1])} a row"


def _merged(metas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for meta in metas:
        for key, value in meta.items():
            if key in merged and merged[key] != value:
                raise ValueError(f"the batches disagree about '{key}': {merged[key]!r} and {value!r}")
            merged[key] = value
    return merged


def _take(column: Column, rows: Tensor) -> Column:
    if isinstance(column, Ragged):
        return column.select(rows)
    if isinstance(column, Tensor):
        return column[rows.to(column.device)]
    return [column[row] for row in rows.tolist()]


TENSORS, LAYOUT = "tensors.safetensors", "batch.json"


def _write(columns: Mapping[str, Tensor | Ragged | list], meta: dict[str, Any], directory: Path) -> None:
    tensors: dict[str, Tensor] = {}
    layout: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, Ragged):
            layout[name] = {"kind": "ragged"}
            # clones: safetensors refuses tensors that share storage, and columns of one batch do share it
            tensors[f"ragged:{name}:values"] = column.values.detach().contiguous().clone()
            tensors[f"ragged:{name}:offsets"] = column.offsets.clone()
        elif isinstance(column, Tensor):
            layout[name] = {"kind": "dense"}
            tensors[f"dense:{name}"] = column.detach().contiguous().clone()
        else:
            for row, value in enumerate(column):
                _check_json(value, f"row {row} of column '{name}'")
            layout[name] = {"kind": "objects", "rows": column}
    for key, value in meta.items():
        _check_json(value, f"metadata '{key}'")
    text = json.dumps({"columns": layout, "meta": meta})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, directory / TENSORS)
        (directory / LAYOUT).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the batch: {error}", where=str(directory)) from error


def _read(directory: Path) -> tuple[dict[str, Tensor | Ragged | list], dict[str, Any]]:
    try:
        tensors = load_file(directory / TENSORS)
        written = json.loads((directory / LAYOUT).read_text(encoding="utf-8"))
        columns = {name: _column(name, entry, tensors) for name, entry in written["columns"].items()}
        return columns, written["meta"]
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"no batch can be read: {error}",
            where=str(directory),
            fix=f"the directory must hold {TENSORS} and {LAYOUT}, as Batch.save writes them",
        ) from error


def _column(name: str, entry: dict[str, Any], tensors: dict[str, Tensor]) -> Tensor | Ragged | list:
    if entry["kind"] == "ragged":
        return Ragged(tensors[f"ragged:{name}:values"], tensors[f"ragged:{name}:offsets"])
    return tensors[f"dense:{name}"] if entry["kind"] == "dense" else entry["rows"]


def _check_json(value: Any, what: str) -> None:
    """Raise TypeError unless ``value`` survives a round trip through JSON."""
    try:
        kept = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what} cannot be saved as JSON: {error}") from error
    if not kept and value == value:
        raise TypeError(f"{what} would change in JSON (a tuple, a set, or keys that are not strings): {value!r:.120}")


def to_batch(trajectories: Sequence[Trajectory], *, reads_images: bool = False) -> Batch:
    """Build a batch with one row per trajectory.

    With ``reads_images`` it has a column ``images`` even if no row has one: batches of one run have the same columns.

    Columns: ragged ``prompt_ids``, ``response_ids``, ``response_mask``, ``rollout_log_probs``, ``token_versions``, ``support_sizes``
    (the last four aligned with ``response_ids``), ``support_ids``, ``expert_ids``; tensor ``part`` (0 for the first trajectory of an episode);
    objects ``uid``, ``index``, ``data_source``, ``trajectory``, and ``images`` if a row has some. The log-prob of a token that was sampled from a support is that of
    the distribution sampled from; all others are of the whole policy.
    """
    sizes = [t.support_sizes or [0] * len(t.response_ids) for t in trajectories]
    log_probs = [_trained_log_probs(t, row) for t, row in zip(trajectories, sizes, strict=True)]
    ids = Ragged.from_rows([t.response_ids for t in trajectories], torch.int64)
    return Batch(
        {
            "prompt_ids": Ragged.from_rows([t.prompt_ids for t in trajectories], torch.int64),
            "response_ids": ids,
            "response_mask": Ragged.from_rows([t.response_mask for t in trajectories], torch.int64),
            "rollout_log_probs": Ragged.from_rows(log_probs, torch.float32),
            "token_versions": Ragged.from_rows(
                [t.token_versions or [0] * len(t.response_ids) for t in trajectories], torch.int64
            ),
            "support_sizes": Ragged.from_rows(sizes, torch.int32),
            "support_ids": Ragged.from_rows([t.support_ids for t in trajectories], torch.int32),
            "expert_ids": Ragged.from_rows(
                [torch.as_tensor(np.array(t.expert_ids, dtype=np.int16)) for t in trajectories]
            ),
            "part": torch.tensor([t.part for t in trajectories], dtype=torch.int64),
            "uid": [t.uid for t in trajectories],
            "index": [t.index for t in trajectories],
            "data_source": [t.sample.data_source for t in trajectories],
            "trajectory": list(trajectories),
            **images_column([t.images for t in trajectories], always=reads_images),
        }
    )


def _trained_log_probs(trajectory: Trajectory, sizes: Sequence[int]) -> Sequence[float]:
    """Return the engine's log-prob of each token under the distribution whose log-probs are trained."""
    if not trajectory.support_ids:
        return trajectory.rollout_log_probs
    pairs = zip(sizes, trajectory.sampling_log_probs, trajectory.rollout_log_probs, strict=True)
    return [restricted if size else whole for size, restricted, whole in pairs]


def is_broken(trajectory: Trajectory) -> bool:
    return trajectory.episode is not None and trajectory.episode.error is not None


def episode_rows(batch: Batch) -> list[list[int]]:
    """Return the rows of each episode, in segment order; episodes in the order of their first row."""
    rows: dict[tuple[str, int], list[int]] = {}
    for row, name in enumerate(zip(batch.objects("uid"), batch.objects("index"), strict=True)):
        rows.setdefault(name, []).append(row)
    part = batch.tensor("part").tolist()
    return [sorted(members, key=part.__getitem__) for members in rows.values()]
