"""Tic-tac-toe: three in a row win; an invalid move loses."""

from __future__ import annotations

import re

from hone.agents.environments.game import Game

LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe(Game):
    """Game for X (seat 0, which begins) and O; a win is worth 1, a loss -1, a draw 0.

    A turn names a free square, 1 to 9; the last number of its text counts. Facts: ``draw``, ``invalid_move``.
    """

    def __init__(self, *, seat: int | None = None) -> None:
        super().__init__(seat=seat)
        self.squares: list[str] = []
        self._mover: int | None = 0
        self._rewards, self._invalid = [0.0, 0.0], False

    async def begin(self, seed: int) -> None:
        self.squares = [str(number) for number in range(1, 10)]
        self._mover, self._rewards, self._invalid = 0, [0.0, 0.0], False

    @property
    def mover(self) -> int | None:
        return self._mover

    @property
    def rewards(self) -> list[float]:
        return self._rewards

    @property
    def facts(self) -> dict[str, float]:
        over = self._mover is None
        return {"draw": float(over and not any(self._rewards)), "invalid_move": float(self._invalid)}

    def moves(self) -> list[str]:
        return [square for square in self.squares if square.isdigit()]

    async def view(self) -> str:
        rows = (" ".join(self.squares[start : start + 3]) for start in (0, 3, 6))
        return f"You are {'XO'[self._mover or 0]}.\n" + "\n".join(rows)

    async def move(self, text: str) -> None:
        mover = self._mover
        assert mover is not None, "the game is over"
        numbers = re.findall(r"\d+", text)
        if not numbers or numbers[-1] not in self.moves():
            self._end(winner=1 - mover, invalid=True)
            return
        self.squares[int(numbers[-1]) - 1] = "XO"[mover]
        if any(self.squares[a] == self.squares[b] == self.squares[c] for a, b, c in LINES):
            self._end(winner=mover)
        elif not self.moves():
            self._mover = None
        else:
            self._mover = 1 - mover

    def _end(self, winner: int, *, invalid: bool = False) -> None:
        self._rewards = [1.0 if seat == winner else -1.0 for seat in range(2)]
        self._mover, self._invalid = None, invalid
