"""The weights that a server has taken, kept so that of the next version only what changed has to travel.

An engine keeps its weights in forms of its own: packed, joined, divided over processes. The mirror has them as they are published, in
memory that the processes of the engine map. A delta is put into it, checked, and the engine then takes the whole from there:

    parcel --> mirror --> checksum of each whole weight --> parcel of shared memory --> the engine's workers
                              `-- not what was sent: refused, and nothing of the parcel goes on
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hone.errors import GenerationError
from hone.generation.remote.delta import apply, checksum_of
from hone.generation.remote.transports import Mappings, SharedBuffer, copy, opened, padded, view

_LEAST_BYTES = 2**20


class Mirror:
    """A copy of an engine's weights, in the dtype that they are served in: as many bytes as they have."""

    def __init__(self) -> None:
        self._memory, self._mappings = SharedBuffer(), Mappings()
        self._places: dict[str, dict[str, Any]] = {}
        self._used = 0

    def take(self, parcel: dict[str, Any], entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Take a parcel.

        Args:
            parcel: of weights, or of what changed of them.
            entries: what they should be then (:func:`hone.generation.remote.delta.as_entry`).

        Returns:
            The same weights whole, as a parcel for the engine; None when one of them is not what it should be.
        """
        with opened(parcel, self._mappings) as tensors:
            arrived = dict(tensors)
            right = [self._take_one(entry, arrived) for entry in entries]
        if not all(right):
            return None
        pieces = [self._places[entry["name"]] for entry in entries]
        memory = self._memory.at_least(self._used)
        return {"transport": "shared_memory", "path": self._memory.path, "bytes": memory.numel(), "pieces": pieces}

    def close(self) -> None:
        """Forget everything."""
        self._memory.close()
        self._places, self._used = {}, 0

    def _take_one(self, entry: dict[str, Any], arrived: dict[str, Tensor]) -> bool:
        name = entry["name"]
        if entry["delta"]:
            place = self._places.get(name)
            if place is None or (place["dtype"], place["shape"]) != (entry["dtype"], entry["shape"]):
                return False
            target = view(self._memory.at_least(self._used), place)
            try:
                apply(arrived[f"{name} gaps"], arrived[f"{name} values"], target)
            except ValueError:
                return False
        else:
            target = self._room(entry, arrived[name])
            copy(arrived[name], target)
        return checksum_of(target) == entry["checksum"]

    def _room(self, entry: dict[str, Any], tensor: Tensor) -> Tensor:
        """Where a weight lies, from now on if it is new."""
        name, known = entry["name"], self._places.get(entry["name"])
        if list(tensor.shape) != entry["shape"]:
            raise GenerationError(f"weight '{name}' has shape {list(tensor.shape)}, announced was {entry['shape']}")
        if known is None or (known["dtype"], known["shape"]) != (entry["dtype"], entry["shape"]):
            place = {key: entry[key] for key in ("name", "dtype", "shape")}
            self._places[name] = known = {**place, "offset": self._used}
            self._used += padded(tensor.nbytes)
        memory = self._memory.at_least(_LEAST_BYTES)
        if self._used > memory.numel():
            memory = self._memory.at_least(max(self._used, 2 * memory.numel()))
        return view(memory, known)
