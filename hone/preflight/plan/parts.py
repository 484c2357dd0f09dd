"""What takes memory: parts by name, and phases of a step that hold some of them at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

WEIGHTS, OPTIMIZER, GRADIENTS, ACTIVATIONS = "weights", "optimizer", "gradients", "activations"
LOGITS, CACHE, COPIES, OVERHEAD = "logits", "key-value cache", "copies of weights", "process"
ENGINE = "engine beside it"


@dataclass(frozen=True)
class Part:
    """Something that takes memory, in bytes."""

    name: str
    size: float


@dataclass(frozen=True)
class Phase:
    """What a device holds at the fullest moment of a phase."""

    name: str
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, name: str, parts: Iterable[Part]) -> Phase:
        """Parts of the same name together, empty ones left out."""
        sizes: dict[str, float] = {}
        for part in parts:
            sizes[part.name] = sizes.get(part.name, 0.0) + part.size
        return cls(name, tuple(Part(part, size) for part, size in sizes.items() if size))

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(part.size for part in self.parts)

    def size(self, name: str) -> float:
        """Bytes of one part."""
        return next((part.size for part in self.parts if part.name == name), 0.0)
