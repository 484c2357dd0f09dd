"""What changed of a weight since the version before, and how the receiver knows that it has the whole right.

Served in bfloat16, most weights are the same bits before and after an update, as the steps of the optimizer are smaller than their
rounding. What did change travels as gaps and values:

    former   a b c d e f g h            gaps    2   3      (entries that are skipped; 16 bits each)
    new      a b X d e f Y h     -->    values  X   Y
                 ^       ^              checksum of all of ``new``: CRC-32 of its bytes

Bits are compared, so a delta is right for every dtype, NaN and negative zero among them. A weight travels whole where its delta would
be no smaller, and where the receiver has no former one of the same shape and dtype.
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
"""Answer of a server to a parcel whose weights would not be what was announced: it has taken none of them."""
_LONGEST_GAP = 2**16 - 1
_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass(frozen=True)
class Change:
    """A weight on its way.

    Attributes:
        new: the weight itself, contiguous, in the memory of the host.
        checksum: of it.
        changed: entries that are not what they were; None where that is unknown.
        gaps: before each entry that travels, as the bits of 16-bit numbers without sign; None when the whole travels.
        values: those entries, as bytes; None when the whole travels.
    """

    new: Tensor
    checksum: int
    changed: int | None = None
    gaps: Tensor | None = None
    values: Tensor | None = None


def change_of(new: Tensor, former: Tensor | None) -> Change:
    """What has to travel to a receiver that has ``former``; None is a receiver that has nothing."""
    new = new.detach().cpu().contiguous()
    if former is None or former.shape != new.shape or former.dtype != new.dtype:
        return Change(new, checksum_of(new))
    bits = _bits(new)
    at = np.flatnonzero(bits != _bits(former.detach().cpu().contiguous()))
    changed = at.size
    skipped = np.diff(at, prepend=-1) - 1
    if changed and skipped.max() > _LONGEST_GAP:
        at = _with_stops(at, skipped)
        skipped = np.diff(at, prepend=-1) - 1
    if at.size * (2 + new.itemsize) >= new.nbytes:
        return Change(new, checksum_of(new), changed)
    gaps = torch.from_numpy(skipped.astype(np.uint16).view(np.int16))
    values = torch.from_numpy(bits[at].view(np.uint8))
    return Change(new, checksum_of(new), changed, gaps, values)


def apply(gaps: Tensor, values: Tensor, target: Tensor) -> None:
    """Put what changed into the former weight, in place.

    Args:
        gaps, values: as in :class:`Change`.
        target: the former weight, contiguous.

    Raises:
        ValueError: they do not fit into it.
    """
    bits = _bits(target)
    new = values.numpy().view(bits.dtype)
    at = np.cumsum(gaps.numpy().view(np.uint16).astype(np.int64) + 1) - 1
    if at.size != new.size or (at.size and at[-1] >= bits.size):
        raise ValueError(f"{at.size} places and {new.size} values for a weight of {bits.size}")
    bits[at] = new


def checksum_of(tensor: Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(_bits(tensor))


class Differences:
    """What changed of weights since the version that receivers have: found once, however many receivers ask.

    Args:
        former: gives a weight of that version by its name; None when there is none.
    """

    def __init__(self, former: Callable[[str], Tensor | None]) -> None:
        self._former = former
        self._found: dict[tuple[str, torch.dtype], Change] = {}

    def of(self, name: str, new: Tensor) -> Change:
        """The change of a weight.

        Args:
            name: of it.
            new: as it is served; the former one is brought to the same dtype.
        """
        key = name, new.dtype
        if key not in self._found:
            former = self._former(name)
            self._found[key] = change_of(new, None if former is None else former.to(new.dtype))
        return self._found[key]


def as_entry(name: str, change: Change) -> dict[str, Any]:
    """What the receiver is told of a weight, besides its bytes."""
    return {
        "name": name,
        "dtype": str(change.new.dtype).removeprefix("torch."),
        "shape": list(change.new.shape),
        "checksum": change.checksum,
        "delta": change.gaps is not None,
    }


def as_tensors(name: str, change: Change) -> list[tuple[str, Tensor]]:
    """The bytes of a weight on its way: the whole, or gaps and values."""
    if change.gaps is None or change.values is None:
        return [(name, change.new)]
    return [(f"{name} gaps", change.gaps), (f"{name} values", change.values)]


def _bits(tensor: Tensor) -> Any:
    """The entries of a contiguous tensor as numbers of the same size, in the same memory."""
    flat = tensor.reshape(-1)
    return flat.view(torch.uint8).numpy().view(_BITS[tensor.itemsize])


def _with_stops(at: Any, skipped: Any) -> Any:
    """Places with further ones between those that are too far apart for a gap of 16 bits; their entries did not change."""
    stops = skipped // (_LONGEST_GAP + 1)
    behind = np.repeat(np.concatenate(([-1], at[:-1])), stops)
    number = np.arange(stops.sum()) - np.repeat(np.cumsum(stops) - stops, stops) + 1
    return np.sort(np.concatenate((at, behind + number * (_LONGEST_GAP + 1))))
