"""A server's copy of the latest weights, so that only changes have to be sent for the next version.

Engines store weights in other layouts: packed, fused, sharded over processes. The mirror has them as the trainer sends them,
in memory that the processes of the engine map. A delta is applied to the mirror and checked; the engine then loads the whole
weights from there:

    chunk --> mirror --> checksum of each whole weight --> chunk in shared memory --> the engine's workers
                              `-- wrong: the chunk is refused, and the engine gets nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hone.errors import GenerationError
from hone.generation.remote import delta
from hone.generation.remote.transports import Mappings, SharedBuffer, copy, open_chunk, padded, view

_LEAST_BYTES = 2**20


class Mirror:
    """A copy of an engine's weights in their served dtype."""

    def __init__(self) -> None:
        self._memory, self._mappings = SharedBuffer(), Mappings()
        self._places: dict[str, dict[str, Any]] = {}
        self._used = 0

    def apply(self, chunk: dict[str, Any], entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        """Apply a chunk; return one of the whole weights for the engine, or None if a checksum is wrong.

        ``entries`` describe the resulting weights (:func:`hone.generation.remote.delta.as_entry`).
        """
        with open_chunk(chunk, self._mappings) as tensors:
            arrived = dict(tensors)
            valid = [self._apply_entry(entry, arrived) for entry in entries]
        if not all(valid):
            return None
        places = [self._places[entry["name"]] for entry in entries]
        memory = self._memory.at_least(self._used)
        return {"transport": "shared_memory", "path": self._memory.path, "bytes": memory.numel(), "places": places}

    def close(self) -> None:
        self._memory.close()
        self._places, self._used = {}, 0

    def _apply_entry(self, entry: dict[str, Any], arrived: dict[str, Tensor]) -> bool:
        name = entry["name"]
        if entry["delta"]:
            place = self._places.get(name)
            if place is None or (place["dtype"], place["shape"]) != (entry["dtype"], entry["shape"]):
                return False
            target = view(self._memory.at_least(self._used), place)
            try:
                delta.apply(arrived[f"{name} gaps"], arrived[f"{name} values"], target)
            except ValueError:
                return False
        else:
            target = self._place_for(entry, arrived[name])
            copy(arrived[name], target)
        return delta.checksum_of(target) == entry["checksum"]

    def _place_for(self, entry: dict[str, Any], tensor: Tensor) -> Tensor:
        """Return the mirror's tensor of a weight, allocated if it is new."""
        name, place = entry["name"], self._places.get(entry["name"])
        if list(tensor.shape) != entry["shape"]:
            raise GenerationError(
                f"weight '{name}' has shape {list(tensor.shape)}, but its description has {entry['shape']}"
            )
        if place is None or (place["dtype"], place["shape"]) != (entry["dtype"], entry["shape"]):
            described = {key: entry[key] for key in ("name", "dtype", "shape")}
            self._places[name] = place = {**described, "offset": self._used}
            self._used += padded(tensor.nbytes)
        memory = self._memory.at_least(_LEAST_BYTES)
        if self._used > memory.numel():
            memory = self._memory.at_least(max(self._used, 2 * memory.numel()))
        return view(memory, place)
