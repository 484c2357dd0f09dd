"""Which weights of a model have arrived, for engines that would go on with old ones without a word."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hone.errors import GenerationError


class Arrivals:
    """Names of an update's weights, held against those in the model's files.

    Args:
        model: Hugging Face directory.
    """

    def __init__(self, model: str) -> None:
        self._files = sorted(Path(model).glob("*.safetensors"))
        self._arrived: set[str] = set()

    def begin(self) -> None:
        """An update follows."""
        self._arrived = set()

    def note(self, names: Iterable[str]) -> None:
        """These have arrived."""
        self._arrived |= set(names)

    def check(self) -> None:
        """All have.

        Raises:
            GenerationError: some have not.
        """
        expected = self._expected()
        missing = sorted(expected - self._arrived)
        if missing:
            raise GenerationError(
                f"{len(missing)} of {len(expected)} weights have not arrived, such as '{missing[0]}'",
                why="the engine would sample from a mixture of two policies",
                fix="publish every parameter of the policy",
            )

    def _expected(self) -> set[str]:
        from safetensors import safe_open

        names: set[str] = set()
        for path in self._files:
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
        return names
