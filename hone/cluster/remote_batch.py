"""A batch whose columns stay with the workers: the driver holds names, lengths and references.

    driver    RemoteBatch   rows: uid, lengths     layer (prompt_ids, response_ids, ...)  -> blocks A, B
                                                   layer (log_probs, entropy)             -> blocks C, D
    worker    block = the columns that one call on one worker made, in the object store, some rows of the batch

Operations on rows and columns are bookkeeping: which row lies where in which block. A call sends each worker a
:class:`Shard`, the same bookkeeping for its rows; the worker fetches the blocks and puts its batch together.
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
from hone.data.batch import Batch

Index = NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Columns of some rows, out there.

    Attributes:
        ref: a reference as the transport has it.
        size: rows.
    """

    ref: Any
    size: int


@dataclass(frozen=True)
class RowInfo:
    """What the driver knows of the rows: numbers and names, no tokens.

    Attributes:
        uids: prompt group of each row.
        prompts: ``[B]`` tokens of each prompt.
        responses: ``[B]`` tokens of each response.
        units: ``[B]``, rows with equal numbers are never parted; None parts any two.
        partitions: how these rows have been divided over ranks, by what was asked.
    """

    uids: list[str]
    prompts: Index
    responses: Index
    units: Index | None = None
    partitions: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, batch: Batch) -> RowInfo:
        """Of a batch with ``uid``, ``prompt_ids`` and ``response_ids``."""
        units = batch.tensor("unit").numpy() if "unit" in batch else None
        prompts, responses = batch.ragged("prompt_ids").lengths, batch.ragged("response_ids").lengths
        return cls(list(batch.objects("uid")), prompts.numpy(), responses.numpy(), units)

    def __len__(self) -> int:
        return len(self.uids)

    @functools.cached_property
    def lengths(self) -> Lengths:
        """For balance."""
        units = None if self.units is None else torch.tensor(self.units)
        return Lengths.of(torch.tensor(self.prompts), torch.tensor(self.responses), self.uids, units)

    def take(self, rows: Index) -> RowInfo:
        """The given rows."""
        units = None if self.units is None else self.units[rows]
        return RowInfo([self.uids[row] for row in rows.tolist()], self.prompts[rows], self.responses[rows], units)

    @staticmethod
    def concat(parts: Sequence[RowInfo]) -> RowInfo:
        """The rows of all parts."""
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
    """Columns that were made together, and where each row of the batch lies in them.

    Attributes:
        names: of the columns, with the name that each has in the blocks.
        blocks: references.
        block: ``[B]`` block of each row.
        row: ``[B]`` row within the block.
    """

    names: Mapping[str, str]
    blocks: Sequence[Block]
    block: Index
    row: Index

    def take(self, rows: Index) -> Layer:
        """The given rows."""
        return replace(self, block=self.block[rows], row=self.row[rows])


@dataclass(frozen=True)
class Piece:
    """One layer as a worker needs it.

    Attributes:
        names: as of the layer.
        blocks: those that hold the worker's rows.
        index: block (None where there is but one) and row of each of the worker's rows; None when they are all the rows of
            the one block, in order.
    """

    names: Mapping[str, str]
    blocks: Sequence[Block]
    index: tuple[Index | None, Index] | None


@dataclass(frozen=True)
class Shard:
    """What a worker needs to put together its rows of a batch."""

    pieces: Sequence[Piece]
    uids: list[str]
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class Stored:
    """What a worker tells the driver of a batch that it has put into the object store.

    Attributes:
        names: tensor columns, and columns of Python objects; the two lie in blocks of their own.
        refs: references to the two; None where there is no such column.
        size: rows.
        info: of the rows, when the batch says itself what its rows are.
        meta: the batch's.
    """

    names: tuple[tuple[str, ...], tuple[str, ...]]
    refs: tuple[Any, Any]
    size: int
    info: RowInfo | None
    meta: Mapping[str, Any]


class RemoteBatch:
    """The driver's side of a batch. Operations are those of :class:`~hone.data.batch.Batch` that need no column's values.

    Args:
        info: of the rows.
        layers: columns; a later layer hides columns of the same name in earlier ones.
        objects: names of the columns that hold Python objects.
        meta: of the batch as a whole.
    """

    def __init__(
        self, info: RowInfo, layers: Sequence[Layer], objects: frozenset[str] = frozenset(), **meta: Any
    ) -> None:
        self.info, self.objects_in, self.meta = info, objects, meta
        self._layers = list(layers)

    @classmethod
    def of(cls, parts: Sequence[Stored], info: RowInfo, block: Index, row: Index) -> RemoteBatch:
        """The answers of several workers as one batch.

        Args:
            parts: what each worker has stored, with the same columns.
            info: of the rows of the whole.
            block: ``[B]`` part that each row lies in.
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
        """Names of all columns."""
        return [name for layer in self._layers for name in layer.names]

    @property
    def uids(self) -> list[str]:
        """Prompt group of each row."""
        return self.info.uids

    # columns ---------------------------------------------------------------------------------------------------------

    def select(self, *names: str) -> RemoteBatch:
        """Only these columns."""
        missing = [name for name in names if name not in self]
        if missing:
            raise KeyError(f"the batch has no column '{missing[0]}'; it has {sorted(self.names())}")
        return self._with(_narrowed(self._layers, lambda name: name in names))

    def rename(self, names: Mapping[str, str]) -> RemoteBatch:
        """Columns under new names, ``{old: new}``; the others keep theirs."""
        layers = [
            replace(layer, names={names.get(name, name): inside for name, inside in layer.names.items()})
            for layer in self._layers
        ]
        return RemoteBatch(self.info, layers, frozenset(names.get(n, n) for n in self.objects_in), **self.meta)

    def updated(self, other: RemoteBatch) -> RemoteBatch:
        """The columns of both; where both have one, that of ``other``."""
        if len(other) != len(self):
            raise ValueError(f"a batch of {len(self)} rows updated by one of {len(other)}")
        new = set(other.names())
        layers = [*_narrowed(self._layers, lambda name: name not in new), *other._layers]
        return RemoteBatch(self.info, layers, self.objects_in - new | other.objects_in, **{**self.meta, **other.meta})

    # rows ------------------------------------------------------------------------------------------------------------

    def reorder(self, rows: Sequence[int] | Index | Tensor) -> RemoteBatch:
        """The given rows in the given order; also takes a subset, and repeats."""
        index = np.asarray(rows, np.int64)
        return RemoteBatch(
            self.info.take(index), [layer.take(index) for layer in self._layers], self.objects_in, **self.meta
        )

    def slice(self, start: int, stop: int) -> RemoteBatch:
        """Rows ``start`` to ``stop`` (exclusive)."""
        return self.reorder(np.arange(start, stop))

    @staticmethod
    def concat(parts: Sequence[RemoteBatch]) -> RemoteBatch:
        """The rows of all parts, in order; blocks that several parts share stand once."""
        first = parts[0]
        layers = [_joined([part._layers[number] for part in parts]) for number in range(len(first._layers))]
        return RemoteBatch(RowInfo.concat([part.info for part in parts]), layers, first.objects_in, **first.meta)

    # sending ---------------------------------------------------------------------------------------------------------

    def shards(self, parts: Sequence[Index], *, objects: bool) -> list[Shard]:
        """What to send to each of several workers.

        Args:
            parts: rows of each.
            objects: whether columns of Python objects go along.
        """
        layers = self._layers
        if not objects:
            layers = _narrowed(layers, lambda name: name not in self.objects_in)
        places: dict[tuple[int, int], _Places] = {}
        pieces = []
        for layer in layers:
            alike = (id(layer.block), id(layer.row))
            if alike not in places:
                places[alike] = _Places.of(layer, parts)
            pieces.append(places[alike].pieces(layer))
        uids = self.info.uids
        return [
            Shard([of[number] for of in pieces], [uids[row] for row in rows.tolist()], self.meta)
            for number, rows in enumerate(parts)
        ]

    def _with(self, layers: list[Layer]) -> RemoteBatch:
        names = {name for layer in layers for name in layer.names}
        return RemoteBatch(self.info, layers, self.objects_in & names, **self.meta)


def _narrowed(layers: Sequence[Layer], keep: Any) -> list[Layer]:
    """The layers without those columns for which ``keep(name)`` is false."""
    narrowed = (replace(la, names={new: old for new, old in la.names.items() if keep(new)}) for la in layers)
    return [layer for layer in narrowed if layer.names]


def _joined(parts: Sequence[Layer]) -> Layer:
    if any(dict(part.names) != dict(parts[0].names) for part in parts):
        raise ValueError("batches differ in their columns")
    numbers: dict[Block, int] = {}
    tables = [np.asarray([numbers.setdefault(block, len(numbers)) for block in part.blocks]) for part in parts]
    block = np.concatenate([table[part.block] for table, part in zip(tables, parts, strict=True)])
    return Layer(parts[0].names, list(numbers), block, np.concatenate([part.row for part in parts]))


@dataclass(frozen=True)
class _Places:
    """Where the rows of several workers lie, for all layers whose rows lie alike.

    Attributes:
        used: of each worker the numbers of the blocks that hold its rows.
        index: of each worker what :attr:`Piece.index` says, but for whole blocks.
        whole: whether the rows of each worker could be all those of its one block, in order.
    """

    used: list[list[int]]
    index: list[tuple[Index | None, Index]]
    whole: list[bool]

    @classmethod
    def of(cls, layer: Layer, parts: Sequence[Index]) -> _Places:
        sizes = [len(rows) for rows in parts]
        order, starts = np.concatenate(parts), np.concatenate([[0], np.cumsum(sizes)])
        block, row = layer.block[order], layer.row[order]
        in_order = row == np.arange(len(order)) - np.repeat(starts[:-1], sizes)
        bounds = starts[:-1].tolist()
        first, last = np.minimum.reduceat(block, bounds), np.maximum.reduceat(block, bounds)
        whole = (np.logical_and.reduceat(in_order, bounds) & (first == last)).tolist()
        used: list[list[int]] = []
        index: list[tuple[Index | None, Index]] = []
        ends, one = starts.tolist(), (first == last).tolist()
        for number, alone in enumerate(one):
            piece = slice(ends[number], ends[number + 1])
            if alone:
                used.append([int(first[number])])
                index.append((None, row[piece]))
            else:
                blocks, renumbered = np.unique(block[piece], return_inverse=True)
                used.append(blocks.tolist())
                index.append((renumbered, row[piece]))
        return cls(used, index, whole)

    def pieces(self, layer: Layer) -> list[Piece]:
        """The layer as each worker needs it."""
        made = []
        for used, index, whole in zip(self.used, self.index, self.whole, strict=True):
            blocks = [layer.blocks[number] for number in used]
            made.append(Piece(layer.names, blocks, None if whole and len(index[1]) == blocks[0].size else index))
        return made
