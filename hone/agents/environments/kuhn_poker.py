"""Kuhn poker: three cards, one chip each in the pot, one bet (Kuhn 1950)."""

from __future__ import annotations

import random
import re

from hone.agents.environments.game import Game

CARDS = "JQK"


class KuhnPoker(Game):
    """Game for two seats; the reward is the number of chips won, from -2 to 2.

    Without a bet a seat may check or bet; after a bet, call or fold. The last of these words in a turn counts; an invalid move folds.
    The value of the game is -1/18 for seat 0. Fact: ``invalid_move``.
    """

    def __init__(self, *, seat: int | None = None) -> None:
        super().__init__(seat=seat)
        self.cards, self.played = "", list[str]()
        self._shown = [0, 0]  # number of moves that each seat has seen
        self._rewards: list[float] | None = None
        self._invalid = False

    async def begin(self, seed: int) -> None:
        self.cards = "".join(random.Random(seed).sample(CARDS, 2))
        self.played, self._shown, self._rewards, self._invalid = [], [-1, -1], None, False

    @property
    def mover(self) -> int | None:
        return None if self._rewards is not None else len(self.played) % 2

    @property
    def rewards(self) -> list[float]:
        return self._rewards or [0.0, 0.0]

    @property
    def facts(self) -> dict[str, float]:
        return {"invalid_move": float(self._invalid)}

    def moves(self) -> list[str]:
        return ["call", "fold"] if self.played[-1:] == ["bet"] else ["check", "bet"]

    async def view(self) -> str:
        seat = len(self.played) % 2
        card = [f"You have {self.cards[seat]}."] if self._shown[seat] < 0 else []
        said = [f"The other player: {move}." for move in self.played[-1:]]
        self._shown[seat] = len(self.played)
        return " ".join([*card, *said, f"{' or '.join(self.moves())}?"])

    async def move(self, text: str) -> None:
        assert self._rewards is None, "the game is over"
        seat, words = len(self.played) % 2, re.findall(r"\w+", text.lower())
        valid = [word for word in words if word in self.moves()]
        self._invalid = not valid
        word = valid[-1] if valid else "fold"
        better = 0 if CARDS.index(self.cards[0]) > CARDS.index(self.cards[1]) else 1
        if word == "fold":
            self._pay(1 - seat, 1.0)
        elif word == "call":
            self._pay(better, 2.0)
        elif word == "check" and self.played == ["check"]:
            self._pay(better, 1.0)
        else:
            self.played.append(word)

    def _pay(self, winner: int, chips: float) -> None:
        self._rewards = [chips if seat == winner else -chips for seat in range(2)]
