"""Changes of weights since the previous version, with a checksum of the result.

In bfloat16 an update leaves most weights bit-equal, because optimizer steps are smaller than the rounding. Changed elements
are sent as gaps and values:

    former   a b c d e f g h            gaps    2   3      (elements that are skipped; 16 bits each)
    new      a b X d e f Y h     -->    values  X   Y
                 ^       ^              checksum of ``new``: CRC-32 of its bytes

Bits are compared, so a delta is exact for every dtype, NaN and negative zero included. A weight is sent whole if its delta
would not be smaller, or if the receiver has no former weight of the same shape and dtype.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

REFUSED = "refused"
"""Answer of a server that refused a chunk, because the checksum of a weight was wrong."""
_LONGEST_GAP = 2**16 - 1
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Change:
    """A weight, or its change, to send."""

    new: Tensor  # the weight, contiguous, in host memory
    checksum: int  # of ``new``
    changed: int | None = None  # number of changed elements; None if the former weight is unknown
    # before each sent element, as the bits of unsigned 16-bit numbers; None if the whole weight is sent
    gaps: Tensor | None = None
    values: Tensor | None = None  # sent elements as bytes; None if the whole weight is sent


def change_of(new: Tensor, former: Tensor | None) -> Change:
    """Return what to send to a receiver that has ``former``, or nothing if that is None."""
    new = new.detach().cpu().contiguous()
    if former is None or former.shape != new.shape or former.dtype != new.dtype:
        return Change(new, checksum_of(new))
    bits = _bits(new)
    at = np.flatnonzero(bits != _bits(former.detach().cpu().contiguous()))
    changed = at.size
    skipped = np.diff(at, prepend=-1) - 1
    if changed and skipped.max() > _LONGEST_GAP:
        at = _with_fillers(at, skipped)
        skipped = np.diff(at, prepend=-1) - 1
    if at.size * (2 + new.itemsize) >= new.nbytes:
        return Change(new, checksum_of(new), changed)
    gaps = torch.from_numpy(skipped.astype(np.uint16).view(np.int16))
    values = torch.from_numpy(bits[at].view(np.uint8))
    return Change(new, checksum_of(new), changed, gaps, values)


def apply(gaps: Tensor, values: Tensor, target: Tensor) -> None:
    """Apply a :class:`Change` to the former weight, contiguous, in place.

    Raises:
        ValueError: the change does not fit the weight.
    """
    bits = _bits(target)
    new = values.numpy().view(bits.dtype)
    at = np.cumsum(gaps.numpy().view(np.uint16).astype(np.int64) + 1) - 1
    if at.size != new.size or (at.size and at[-1] >= bits.size):
        raise ValueError(f"{at.size} gaps and {new.size} values for a weight of {bits.size} elements")
    bits[at] = new


def checksum_of(tensor: Tensor) -> int:
    """Return the CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(_bits(tensor))


class Differences:
    """Changes of weights since the receivers' version, computed once for all receivers."""

    def __init__(self, former: Callable[[str], Tensor | None]) -> None:
        self._former = former
        self._changes: dict[tuple[str, torch.dtype], Change] = {}

    def change(self, name: str, new: Tensor) -> Change:
        """Return the change of a weight in the served dtype, to which the former one is converted."""
        key = name, new.dtype
        if key not in self._changes:
            former = self._former(name)
            self._changes[key] = change_of(new, None if former is None else former.to(new.dtype))
        return self._changes[key]


def as_entry(name: str, change: Change) -> dict[str, Any]:
    return {
        "name": name,
        "dtype": str(change.new.dtype).removeprefix("torch."),
        "shape": list(change.new.shape),
        "checksum": change.checksum,
        "delta": change.gaps is not None,
    }


def as_tensors(name: str, change: Change) -> list[tuple[str, Tensor]]:
    """Return the tensors to send for a weight: the whole, or gaps and values."""
    if change.gaps is None or change.values is None:
        return [(name, change.new)]
    return [(f"{name} gaps", change.gaps), (f"{name} values", change.values)]


def _bits(tensor: Tensor) -> Any:
    """Return the elements of a contiguous tensor as unsigned integers of the same size, in the same memory."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().view(_BITS[tensor.itemsize])


def _with_fillers(at: Any, skipped: Any) -> Any:
    """Insert positions of unchanged elements between positions whose distance exceeds a gap of 16 bits."""
    fillers = skipped // (_LONGEST_GAP + 1)
    previous = np.repeat(np.concatenate(([-1], at[:-1])), fillers)
    number = np.arange(fillers.sum()) - np.repeat(np.cumsum(fillers) - fillers, fillers) + 1
    return np.sort(np.concatenate((at, previous + number * (_LONGEST_GAP + 1))))
