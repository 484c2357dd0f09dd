"""Program that plays environments of other packages, in the Python environment where they are installed.

:mod:`hone.agents.environments.hosted` starts it with that interpreter, so it imports nothing of Hone. Requests and answers are JSON
lines on standard input and output; all other output goes to standard error.

    {"id": 1, "op": "begin", "session": 7, "package": "textarena", "name": "TicTacToe-v0", "players": 2, "seed": 3, "options": {}}
    {"id": 1, "mover": 0, "text": "...", "rewards": [0.0, 0.0], "facts": {}}
    {"id": 2, "op": "move", "session": 7, "text": "[4]"}
    {"id": 3, "op": "end", "session": 7}

``mover`` is null after the end of the game. An answer with ``refused`` says that no such environment can be begun, one with ``failed``
reports a failure. The program ends when its standard input closes.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import traceback
from typing import Any

REFUSALS = (ImportError, LookupError, ValueError, TypeError, AssertionError, AttributeError)
"""Errors of a beginning that follow from what was asked for, or from what is installed."""


class TextArena:
    """A game of TextArena, for one player or several."""

    def __init__(self, name: str, players: int, options: dict[str, Any]) -> None:
        self.env = importlib.import_module("textarena").make(name, **options)
        self.inner = self.env  # observations without a wrapper are only what is new
        while hasattr(self.inner, "env"):
            self.inner = self.inner.env
        self.players, self.done = players, False

    def begin(self, seed: int) -> None:
        self.env.reset(num_players=self.players, seed=seed)

    def move(self, text: str) -> None:
        self.done, _ = self.env.step(action=text)

    def state(self) -> dict[str, Any]:
        if self.done:
            rewards, info = self.env.close()
            invalid = any(one.get("invalid_move") for one in info.values())
            total = [float((rewards or {}).get(seat, 0.0)) for seat in range(self.players)]
            return {"mover": None, "text": "", "rewards": total, "facts": {"invalid_move": float(invalid)}}
        seat, seen = self.inner.get_observation()
        texts = [f"[Player {sender}] {text}" if sender >= 0 else text for sender, text, _ in seen if sender != seat]
        return {"mover": seat, "text": "\n".join(texts), "rewards": [0.0] * self.players, "facts": {}}


class Gem:
    """An environment of GEM."""

    def __init__(self, name: str, players: int, options: dict[str, Any]) -> None:
        self.env = importlib.import_module("gem").make(name, **options)
        self.done, self.reward = False, 0.0

    def begin(self, seed: int) -> None:
        self._see(*self.env.reset(seed=seed))

    def move(self, text: str) -> None:
        observation, reward, terminated, truncated, info = self.env.step(text)
        self.done, self.reward = bool(terminated or truncated), self.reward + float(reward)
        self._see(observation, info)

    def _see(self, observation: Any, info: dict[str, Any]) -> None:
        self.text = "\n".join(str(part) for part in (observation, info.get("suffix")) if part)

    def state(self) -> dict[str, Any]:
        return {"mover": None if self.done else 0, "text": self.text, "rewards": [self.reward], "facts": {}}


PACKAGES = {"textarena": TextArena, "gem": Gem}


class Sessions:
    """Games under way, each with its own state of the random generators, which these packages share."""

    def __init__(self) -> None:
        self.games: dict[Any, Any] = {}
        self.states: dict[Any, Any] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op, session = request["op"], request.get("session")
        if op == "cancel":
            return {}
        if op == "end":
            self.states.pop(session, None)
            self.games.pop(session, None)
            return {}
        if op == "begin":
            try:
                game = PACKAGES[request["package"]](request["name"], request["players"], request["options"])
                _seed(request["seed"])
                game.begin(request["seed"])
            except REFUSALS as error:
                return {"refused": f"{type(error).__name__}: {error}"}
            self.games[session] = game
        else:
            _restore(self.states[session])
            game = self.games[session]
            game.move(request["text"])
        state = game.state()
        self.states[session] = _generators()
        return state


def _seed(seed: int) -> None:
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _generators() -> Any:
    numpy = sys.modules.get("numpy")
    return random.getstate(), numpy and numpy.random.get_state()


def _restore(state: Any) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # what packages print must not be read as an answer
    sessions = Sessions()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = sessions.answer(request)
        except Exception as error:  # noqa: BLE001 - a failed game must not end the others
            answer = {"failed": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        print(json.dumps({"id": request["id"], **answer}), file=answers, flush=True)


if __name__ == "__main__":
    main()
