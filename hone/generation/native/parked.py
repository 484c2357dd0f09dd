"""What ended turns leave behind for the next turn of their episode: the keys and values of every token so far."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from torch import Tensor

Slabs = dict[int, tuple[Tensor, Tensor]]
"""Keys and values ``[kv_heads, length, head_dim]`` of every layer."""


@dataclass(frozen=True)
class Turn:
    """An ended turn.

    Attributes:
        ids: the tokens whose keys and values are kept, from the first of the episode on.
        version: of the weights that computed all of them.
        slabs: keys and values.
    """

    ids: list[int]
    version: int
    slabs: Slabs


class ParkedTurns:
    """The last turn of each session, as many as fit; the longest unused one goes first.

    Args:
        limit: most tokens kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self.tokens = limit, 0
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def put(self, session: str, turn: Turn) -> None:
        """Keep the turn in place of the session's earlier one."""
        self.forget([session])
        if len(turn.ids) > self.limit:
            return
        self._turns[session] = turn
        self.tokens += len(turn.ids)
        while self.tokens > self.limit:
            self.forget([next(iter(self._turns))])

    def find(self, session: str | None, prompt_ids: Sequence[int], version: int) -> tuple[Turn, int] | None:
        """The session's turn and how many tokens of the prompt it begins with, its last token left out.

        None when there is none, it was computed by other weights, or it begins differently.
        """
        turn = self._turns.get(session) if session is not None else None
        if session is None or turn is None or turn.version != version:
            return None
        self._turns.move_to_end(session)
        pairs = zip(turn.ids, prompt_ids[:-1], strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return (turn, shared) if shared else None

    def forget(self, sessions: Iterable[str]) -> None:
        """Drop what these sessions left."""
        for session in sessions:
            turn = self._turns.pop(session, None)
            self.tokens -= len(turn.ids) if turn else 0

    def clear(self) -> None:
        """Drop everything."""
        self._turns.clear()
        self.tokens = 0
