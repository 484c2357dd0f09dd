"""Pages in use, with the number of their users: rows and kept turns of sessions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SCRATCH = 0
"""The page of rows that only fill up a batch; it belongs to no sequence."""


class OutOfPages(RuntimeError):
    """Fewer pages are free than a caller needs."""


class Pages:
    """Pages ``1 .. count - 1`` of a pool; page 0 is :data:`SCRATCH`."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._users = [0] * count
        self._free = list(range(count - 1, SCRATCH, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of pages with a user."""
        return self.count - 1 - self.free

    def users(self, page: int) -> int:
        return self._users[page]

    def take(self, count: int) -> list[int]:
        """Return free pages, each with one user.

        Raises:
            OutOfPages: fewer are free; none is taken.
        """
        if count > self.free:
            raise OutOfPages(f"{count} pages are needed, {self.free} of {self.count - 1} are free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._users[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a user to pages that are in use."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free"
            self._users[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a user from pages; those without another are free."""
        for page in pages:
            assert self._users[page] > 0, f"page {page} is free already"
            self._users[page] -= 1
            if not self._users[page]:
                self._free.append(page)


def pages_for(tokens: int, size: int) -> int:
    """Return how many pages of ``size`` tokens hold ``tokens`` tokens."""
    return -(-tokens // size)
