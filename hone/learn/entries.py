"""Entries of the course: which boxes a learner takes in which order, and on which of 30 days."""

from __future__ import annotations

from dataclasses import dataclass

from hone.errors import HoneError, did_you_mean


@dataclass(frozen=True)
class Stop:
    """A box on the way of an entry, with its day from 1 to 30."""

    day: int
    box: str

    @property
    def week(self) -> int:
        """Week from 1 to 4; the last two days belong to the fourth."""
        return min(4, (self.day + 6) // 7)


@dataclass(frozen=True)
class Entry:
    """A way through the course.

    Attributes:
        name: name on the command line.
        title: readers whom it is for.
        stops: its boxes in order, with their days.
    """

    name: str
    title: str
    stops: tuple[Stop, ...]

    @property
    def boxes(self) -> list[str]:
        """Names of its boxes, in order."""
        return [stop.box for stop in self.stops]


def _stops(days: dict[int, str]) -> tuple[Stop, ...]:
    return tuple(Stop(day, box) for day, names in days.items() for box in names.split())


def find_entry(name: str) -> Entry:
    """Return an entry by its name.

    Raises:
        HoneError: there is no such entry.
    """
    if name not in ENTRIES:
        raise HoneError(f"no entry '{name}'", fix=did_you_mean(name, ENTRIES), code="E-learn", where="hone learn start")
    return ENTRIES[name]


ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(
            "new",
            "new to RL for language models",
            _stops({1: "install data_and_model first_training curves evaluate baseline"}),
        ),
        Entry("sft", "from SFT to RL", _stops({1: "install data_and_model"})),
        Entry("agents", "building agents", _stops({1: "install data_and_model"})),
    )
}
"""The three entries."""
