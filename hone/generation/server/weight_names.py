"""Check that all weights of a model have arrived, for engines that would silently keep old ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hone.errors import GenerationError


class Arrivals:
    """Names of the arrived weights, to compare with those in the model's files.

    Args:
        model: Hugging Face directory.
    """

    def __init__(self, model: str) -> None:
        self._files = sorted(Path(model).glob("*.safetensors"))
        self._arrived: set[str] = set()

    def begin(self) -> None:
        """Start a weight sync."""
        self._arrived = set()

    def note(self, names: Iterable[str]) -> None:
        """Add names of arrived weights."""
        self._arrived |= set(names)

    def check(self) -> None:
        """Check that all weights have arrived."""
        expected = self._expected()
        missing = sorted(expected - self._arrived)
        if missing:
            raise GenerationError(
                f"{len(missing)} of {len(expected)} weights have not arrived, such as '{missing[0]}'",
                why="the engine would sample from a mixture of two policies",
                fix="send every parameter of the policy",
            )

    def _expected(self) -> set[str]:
        from safetensors import safe_open

        names: set[str] = set()
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
        return names
