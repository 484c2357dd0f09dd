"""Batch whose columns stay with the workers: the driver holds names, lengths and references.

    driver    RemoteBatch   rows: uid, lengths     layer (prompt_ids, response_ids, ...)  -> blocks A, B
                                                   layer (log_probs, entropy)             -> blocks C, D
        worker    block = the columns that one call on one worker made, in the object store, for some rows of the batch

Operations on rows and columns are bookkeeping: the block and the position of each row. A call sends each worker a
:class:`Shard`, the same bookkeeping for its rows; the worker fetches the blocks and assembles its batch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hone.data.balance import Lengths
from hone.data.batch import Batch, Column

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Columns of some rows in the object store.

    Attributes:
        ref: reference of the transport.
        size: number of rows.
    """

    ref: Any
    size: int


@dataclass(frozen=True)
class RowInfo:
    """The driver's data about the rows: numbers and names, no tokens.

    Attributes:
        uids: prompt group of each row.
        prompts: ``[B]`` tokens of each prompt.
        responses: ``[B]`` tokens of each response.
        units: ``[B]``, equal numbers for rows that must stay together; None: any may be split.
        partitions: cached divisions of these rows over ranks, by request.
    """

    uids: list[str]
    prompts: Index
    responses: Index
    units: Index | None = None
    partitions: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def from_batch(cls, batch: Batch) -> RowInfo:
        """Build from a batch with ``uid``, ``prompt_ids`` and ``response_ids``."""
        units = batch.tensor("unit").numpy() if "unit" in batch else None
        prompts, responses = batch.ragged("prompt_ids").lengths, batch.ragged("response_ids").lengths
        return cls(list(batch.objects("uid")), prompts.numpy(), responses.numpy(), units)

    def __len__(self) -> int:
        return len(self.uids)

    @functools.cached_property
    def lengths(self) -> Lengths:
        """Return the lengths for balancing."""
        units = None if self.units is None else torch.tensor(self.units)
        return Lengths.from_uids(torch.tensor(self.prompts), torch.tensor(self.responses), self.uids, units)

    def take(self, rows: Index) -> RowInfo:
        """Return the given rows."""
        units = None if self.units is None else self.units[rows]
        return RowInfo([self.uids[row] for row in rows.tolist()], self.prompts[rows], self.responses[rows], units)

    @staticmethod
    def concat(parts: Sequence[RowInfo]) -> RowInfo:
        """Concatenate the rows of all parts."""
        if len(parts) == 1:
            return parts[0]
        units = None
        if all(part.units is not None for part in parts):
            units = np.concatenate([part.units for part in parts if part.units is not None])
        return RowInfo(
            [uid for part in parts for uid in part.uids],
            np.concatenate([part.prompts for part in parts]),
            np.concatenate([part.responses for part in parts]),
            units,
        )


@dataclass(frozen=True)
class Layer:
    """Columns that were made together, and the place of each row of the batch in them.

    Attributes:
        names: names of the columns, with their names in the blocks.
        blocks: references to the blocks.
        block: ``[B]`` block of each row.
        row: ``[B]`` row within the block.
    """

    names: Mapping[str, str]
    blocks: Sequence[Block]
    block: Index
    row: Index

    def take(self, rows: Index) -> Layer:
        """Return the given rows."""
        return replace(self, block=self.block[rows], row=self.row[rows])


@dataclass(frozen=True)
class LayerPart:
    """Part of a layer that a worker needs.

    Attributes:
        names: names as in the layer.
        blocks: blocks with rows of the worker.
        index: block (None if there is only one) and row of each of the worker's rows; None if they are all rows of the
            only block, in order.
    """

    names: Mapping[str, str]
    blocks: Sequence[Block]
    index: tuple[Index | None, Index] | None

    def columns(self, blocks: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
        """Return the columns under their names in the batch, given those of each block."""
        inside = list(dict.fromkeys(self.names.values()))
        parts = [Batch({name: columns[name] for name in inside}) for columns in blocks]
        whole = parts[0] if len(parts) == 1 else Batch.concat(parts)
        if self.index is not None:
            starts = torch.tensor([0, *(block.size for block in self.blocks)]).cumsum(0)
            block, row = self.index
            rows = torch.tensor(row)
            whole = whole.reorder(rows if block is None else rows + starts[torch.tensor(block)])
        return {name: whole[old] for name, old in self.names.items()}


@dataclass(frozen=True)
class Shard:
    """Data from which a worker assembles its rows of a batch."""

    layers: Sequence[LayerPart]
    uids: list[str]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """Report of a worker to the driver about a batch that it put into the object store.

    Attributes:
        names: tensor columns, columns of Python objects, and the column of images; the three are in separate blocks.
        refs: references to the three; None without such columns.
        size: number of rows.
        info: description of the rows, if the batch defines its rows.
        meta: metadata of the batch.
    """

    names: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    refs: tuple[Any, Any, Any]
    size: int
    info: RowInfo | None
    meta: Mapping[str, Any]


class RemoteBatch:
    """Driver's side of a batch. Operations are those of :class:`~hone.data.batch.Batch` that need no column values.

    Args:
        info: description of the rows.
        layers: columns; a later layer hides columns of the same name in earlier ones.
        objects: names of the columns of Python objects.
        meta: metadata of the whole batch.
    """

    def __init__(
        self, info: RowInfo, layers: Sequence[Layer], objects: frozenset[str] = frozenset(), **meta: Any
    ) -> None:
        self.info, self.objects_in, self.meta = info, objects, meta
        self._layers = list(layers)

    @classmethod
    def from_stored(cls, parts: Sequence[Stored], info: RowInfo, block: Index, row: Index) -> RemoteBatch:
        """Combine the results of several workers to one batch.

        Args:
            parts: stored batch of each worker, with the same columns.
            info: description of all rows.
            block: ``[B]`` part of each row.
            row: ``[B]`` row within the part.
        """
        layers = [
            Layer({name: name for name in names}, [Block(part.refs[kind], part.size) for part in parts], block, row)
            for kind, names in enumerate(parts[0].names)
            if names
        ]
        return cls(info, layers, frozenset(parts[0].names[1]), **parts[0].meta)

    # access ----------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.info)

    def __contains__(self, name: object) -> bool:
        return any(name in layer.names for layer in self._layers)

    def names(self) -> list[str]:
        """Return the names of all columns."""
        return [name for layer in self._layers for name in layer.names]

    @property
    def uids(self) -> list[str]:
        """Return the prompt group of each row."""
        return self.info.uids

    # columns ---------------------------------------------------------------------------------------------------------

    def select(self, *names: str) -> RemoteBatch:
        """Return a batch with only these columns, and ``uid``, which every row has."""
        missing = [name for name in names if name != "uid" and name not in self]
        if missing:
            raise KeyError(f"the batch has no column '{missing[0]}'; it has {sorted(self.names())}")
        return self._with(_with_columns(self._layers, lambda name: name in names))

    def rename(self, names: Mapping[str, str]) -> RemoteBatch:
        """Rename columns, ``{old: new}``; other columns keep their names."""
        layers = [
            replace(layer, names={names.get(name, name): inside for name, inside in layer.names.items()})
            for layer in self._layers
        ]
        return RemoteBatch(self.info, layers, frozenset(names.get(n, n) for n in self.objects_in), **self.meta)

    def updated(self, other: RemoteBatch) -> RemoteBatch:
        """Combine the columns of both batches; ``other`` wins where both have one."""
        if len(other) != len(self):
            raise ValueError(f"a batch of {len(self)} rows cannot be updated by one of {len(other)} rows")
        new = set(other.names())
        layers = [*_with_columns(self._layers, lambda name: name not in new), *other._layers]
        return RemoteBatch(self.info, layers, self.objects_in - new | other.objects_in, **{**self.meta, **other.meta})

    # rows ------------------------------------------------------------------------------------------------------------

    def reorder(self, rows: Sequence[int] | Index | Tensor) -> RemoteBatch:
        """Return the given rows in the given order; subsets and repeats are allowed."""
        index = np.asarray(rows, np.int64)
        return RemoteBatch(
            self.info.take(index), [layer.take(index) for layer in self._layers], self.objects_in, **self.meta
        )

    def slice(self, start: int, stop: int) -> RemoteBatch:
        """Return rows ``start`` to ``stop`` (exclusive)."""
        return self.reorder(np.arange(start, stop))

    @staticmethod
    def concat(parts: Sequence[RemoteBatch]) -> RemoteBatch:
        """Concatenate the rows of all parts, in order; shared blocks are stored once."""
        first, layered = parts[0], _aligned([part._layers for part in parts])
        layers = [_concat_layers(layers) for layers in layered]
        return RemoteBatch(RowInfo.concat([part.info for part in parts]), layers, first.objects_in, **first.meta)

    # sending ---------------------------------------------------------------------------------------------------------

    def shards(self, parts: Sequence[Index], *, objects: bool) -> list[Shard]:
        """Return the shard to send to each of several workers.

        Args:
            parts: rows of each worker.
            objects: whether columns of Python objects are sent too.
        """
        layers = self._layers
        if not objects:
            layers = _with_columns(layers, lambda name: name not in self.objects_in)
        places: dict[tuple[int, int], _Places] = {}
        parts_by_layer = []
        for layer in layers:
            layout = (id(layer.block), id(layer.row))
            if layout not in places:
                places[layout] = _Places.from_layer(layer, parts)
            parts_by_layer.append(places[layout].parts_of(layer))
        uids = self.info.uids
        return [
            Shard(
                [parts_of_layer[number] for parts_of_layer in parts_by_layer],
                [uids[row] for row in rows.tolist()],
                self.meta,
            )
            for number, rows in enumerate(parts)
        ]

    def _with(self, layers: list[Layer]) -> RemoteBatch:
        names = {name for layer in layers for name in layer.names}
        return RemoteBatch(self.info, layers, self.objects_in & names, **self.meta)


def _with_columns(layers: Sequence[Layer], keep: Any) -> list[Layer]:
    """Return the layers without columns for which ``keep(name)`` is false."""
    filtered = (replace(la, names={new: old for new, old in la.names.items() if keep(new)}) for la in layers)
    return [layer for layer in filtered if layer.names]


def _aligned(parts: Sequence[Sequence[Layer]]) -> list[list[Layer]]:
    """Return for each set of columns that are in one layer of every part these layers, restricted to the set.

    Columns that were made together in one part may have been made one after the other in another.

    Raises:
        ValueError: the parts have different columns.
    """
    places = [
        {name: (number, stored) for number, layer in enumerate(layers) for name, stored in layer.names.items()}
        for layers in parts
    ]
    if any(place.keys() != places[0].keys() for place in places):
        raise ValueError("batches differ in their columns")
    together: dict[tuple[int, ...], list[str]] = {}
    for name, (_, stored) in places[0].items():
        if any(place[name][1] != stored for place in places):
            raise ValueError(f"batches differ in the origin of column '{name}'")
        together.setdefault(tuple(place[name][0] for place in places), []).append(name)
    return [
        [
            replace(layers[number], names={name: layers[number].names[name] for name in names})
            for layers, number in zip(parts, numbers, strict=True)
        ]
        for numbers, names in together.items()
    ]


def _concat_layers(parts: Sequence[Layer]) -> Layer:
    """Concatenate the rows of layers with the same columns."""
    numbers: dict[Block, int] = {}
    tables = [np.asarray([numbers.setdefault(block, len(numbers)) for block in part.blocks]) for part in parts]
    block = np.concatenate([table[part.block] for table, part in zip(tables, parts, strict=True)])
    return Layer(parts[0].names, list(numbers), block, np.concatenate([part.row for part in parts]))


@dataclass(frozen=True)
class _Places:
    """Places of the rows of several workers, for all layers with the same places.

    Attributes:
        used: numbers of the blocks with rows of each worker.
        index: :attr:`LayerPart.index` of each worker, without the case of whole blocks.
        whole: whether the rows of each worker could be all rows of its only block, in order.
    """

    used: list[list[int]]
    index: list[tuple[Index | None, Index]]
    whole: list[bool]

    @classmethod
    def from_layer(cls, layer: Layer, parts: Sequence[Index]) -> _Places:
        sizes = [len(rows) for rows in parts]
        order, starts = np.concatenate(parts), np.concatenate([[0], np.cumsum(sizes)])
        block, row = layer.block[order], layer.row[order]
        in_order = row == np.arange(len(order)) - np.repeat(starts[:-1], sizes)
        bounds = starts[:-1].tolist()
        first, last = np.minimum.reduceat(block, bounds), np.maximum.reduceat(block, bounds)
        whole = (np.logical_and.reduceat(in_order, bounds) & (first == last)).tolist()
        used: list[list[int]] = []
        index: list[tuple[Index | None, Index]] = []
        ends, single_block = starts.tolist(), (first == last).tolist()
        for number, in_one_block in enumerate(single_block):
            rows_of_worker = slice(ends[number], ends[number + 1])
            if in_one_block:
                used.append([int(first[number])])
                index.append((None, row[rows_of_worker]))
            else:
                blocks, renumbered = np.unique(block[rows_of_worker], return_inverse=True)
                used.append(blocks.tolist())
                index.append((renumbered, row[rows_of_worker]))
        return cls(used, index, whole)

    def parts_of(self, layer: Layer) -> list[LayerPart]:
        """Return the part of the layer that each worker needs."""
        layer_parts = []
        for used, index, whole in zip(self.used, self.index, self.whole, strict=True):
            blocks = [layer.blocks[number] for number in used]
            layer_parts.append(
                LayerPart(layer.names, blocks, None if whole and len(index[1]) == blocks[0].size else index)
            )
        return layer_parts
