"""Base class of games of several seats, which the policy plays against a fixed opponent or against itself.

The loop ``environment`` gives the policy one seat, and an opponent that moves at random the others. The loop ``self_play`` lets the
policy play all seats, each in a conversation of its own.
"""

from __future__ import annotations

import random
from abc import abstractmethod

from hone.agents.environments.base import Environment, Step
from hone.agents.messages import AssistantTurn, Message
from hone.data.seeding import derive_seed
from hone.errors import ConfigError


class Game(Environment):
    """Game whose seats, numbered from 0, move in turn.

    An option of every game: ``seat`` is that of the policy against an opponent; None draws it from the seed.
    """

    players = 2
    id = ""
    """Which of its games, if it has several; with the name and the seat it names a role."""

    def __init__(self, *, seat: int | None = None) -> None:
        if seat is not None and not 0 <= seat < self.players:
            raise ValueError(f"seat={seat} of {self.players} seats")
        self.seat = seat
        self._own, self._opponent = 0, random.Random()

    @abstractmethod
    async def begin(self, seed: int) -> None:
        """Begin a game; what is shown depends only on ``seed``, the options and the moves."""

    @property
    @abstractmethod
    def mover(self) -> int | None:
        """Seat whose turn it is; None after the end."""

    @abstractmethod
    async def view(self) -> str:
        """Return what the mover has not been shown yet."""

    @abstractmethod
    async def move(self, text: str) -> None:
        """Carry out the move that is written in the mover's turn; an invalid one may end the game."""

    @property
    @abstractmethod
    def rewards(self) -> list[float]:
        """Reward of each seat so far."""

    @property
    def facts(self) -> dict[str, float]:
        """Named numbers of the game so far."""
        return {}

    def moves(self) -> list[str]:
        """Return the valid moves of the mover, from which a fixed opponent draws."""
        raise ConfigError(
            f"{type(self).__name__} has no opponent for {self.players} players: it does not say which moves are valid",
            why="the loop 'environment' gives the policy one seat",
            fix="let the policy play all seats: make the rows with `hone data make self_play:NAME`",
            where="agent_name",
        )

    async def reset(self, seed: int) -> list[Message]:
        """Begin a game against the opponent, which moves first if the policy's seat is not the first."""
        await self.begin(seed)
        self._own = derive_seed(seed, "seat") % self.players if self.seat is None else self.seat
        self._opponent = random.Random(derive_seed(seed, "opponent"))
        await self._let_opponent_move()
        return [{"role": "user", "content": await self.view()}]

    async def step(self, turn: AssistantTurn) -> Step:
        before = self.rewards[self._own]
        await self.move(turn.content)
        await self._let_opponent_move()
        total = self.rewards[self._own]
        facts = {"solved": float(total > 0), **self.facts}
        if self.mover is None:
            return Step(reward=total - before, done=True, facts=facts)
        return Step.says(await self.view(), reward=total - before, facts=facts)

    async def _let_opponent_move(self) -> None:
        while self.mover not in (None, self._own):
            await self.move(self._opponent.choice(self.moves()))
