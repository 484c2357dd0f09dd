"""The session KV cache: KV of finished turns, kept for the next turn of their episode."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

Kept = TypeVar("Kept")
"""What a cache keeps of a turn."""


@dataclass(frozen=True)
class CachedTurn(Generic[Kept]):
    """A finished turn."""

    ids: list[int]  # all cached tokens of the episode
    version: int  # of the weights that computed them
    entries: Kept  # their cache entries: tensors by layer, or pages


class SessionCache(Generic[Kept]):
    """The last turn of each session; the least recently used is dropped first.

    Args:
        limit: maximum of tokens.
        per_token: whether a turn can be shortened; otherwise only a prompt that continues all of its tokens can use it.
        on_drop: gets the entries of each turn that is dropped.
    """

    def __init__(
        self, limit: int, *, per_token: bool = True, on_drop: Callable[[Kept], None] = lambda entries: None
    ) -> None:
        self.limit, self.tokens, self._per_token, self._on_drop = limit, 0, per_token, on_drop
        self._turns: OrderedDict[str, CachedTurn[Kept]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[CachedTurn[Kept]]:
        return iter(self._turns.values())

    def put(self, session: str, turn: CachedTurn[Kept]) -> None:
        """Store a turn in place of the session's earlier one; one that is too long is dropped at once."""
        self.forget([session])
        if len(turn.ids) > self.limit:
            self._on_drop(turn.entries)
            return
        self._turns[session] = turn
        self.tokens += len(turn.ids)
        while self.tokens > self.limit:
            self.forget_oldest()

    def find(self, session: str | None, prompt_ids: Sequence[int], version: int) -> tuple[CachedTurn[Kept], int] | None:
        """Return the session's turn and the length of its common prefix with the prompt, the prompt's last token excluded.

        None if there is no turn, other weights computed it, or there is no common prefix.
        """
        turn = self._turns.get(session) if session is not None else None
        if session is None or turn is None or turn.version != version:
            return None
        self._turns.move_to_end(session)
        pairs = zip(turn.ids, prompt_ids[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        usable = shared if self._per_token or shared == len(turn.ids) else 0
        return (turn, usable) if usable else None

    def forget(self, sessions: Iterable[str]) -> None:
        """Drop the turns of these sessions."""
        for session in sessions:
            if turn := self._turns.pop(session, None):
                self.tokens -= len(turn.ids)
                self._on_drop(turn.entries)

    def forget_oldest(self) -> None:
        """Drop the turn that was not used for the longest time."""
        self.forget([next(iter(self._turns))])

    def clear(self) -> None:
        self.forget(list(self._turns))
