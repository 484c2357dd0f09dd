"""Adapter for gymnasium environments whose observations can be written as text.

The observation is the environment's text: the rendering of ``render_mode="ansi"``, an observation of a ``Text`` space, or the
printed value. An action of a ``Text`` space is the turn itself; an action of a ``Discrete`` space is a number, or one of the
names in ``actions``.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from hone.agents.environments.base import Environment, Step
from hone.agents.messages import AssistantTurn, Message
from hone.errors import ConfigError
from hone.extras import install_command

_ANSI = re.compile(r"\x1b\[(\d*)m")


class Gymnasium(Environment):
    """One gymnasium environment."""

    def __init__(
        self,
        *,
        id: str,  # id for ``gymnasium.make``, for example ``FrozenLake-v1``
        actions: Sequence[str] | None = None,  # names of the actions of a ``Discrete`` space, in their order
        prompt: str | None = None,  # text before the first observation; None lists the actions
        max_steps: int | None = None,  # maximum number of steps of an episode; None uses the environment's limit
        kwargs: dict[str, Any] | None = None,  # further arguments of ``gymnasium.make``
    ) -> None:
        try:
            import gymnasium
            from gymnasium.envs import registration
        except ImportError as error:
            raise ConfigError(
                "the environment 'gymnasium' needs the package gymnasium, which is not installed",
                fix=install_command("environments"),
            ) from error
        try:
            spec = gymnasium.spec(id)
            env_class: Any = registration.load_env_creator(str(spec.entry_point))
            modes = getattr(env_class, "metadata", {}).get("render_modes", [])
            settings: dict[str, Any] = {"render_mode": "ansi"} if "ansi" in modes else {}
            settings |= {"max_episode_steps": max_steps, **(kwargs or {})}
            self.env = gymnasium.make(id, **settings)
        except (gymnasium.error.Error, ImportError, AttributeError) as error:
            raise ConfigError(
                f"gymnasium cannot make '{id}': {error}", where="extra_info.environment.options", fix="check the id"
            ) from error
        self._renders = self.env.render_mode == "ansi"
        space = self.env.action_space
        if isinstance(space, gymnasium.spaces.Discrete):
            self.names = [str(name) for name in actions or range(int(space.start), int(space.start + space.n))]
            self._first: int | None = int(space.start)
            if len(self.names) != space.n:
                raise ConfigError(
                    f"'{id}' has {space.n} actions, but 'actions' has {len(self.names)} names",
                    fix=f"give {space.n} names",
                )
        elif isinstance(space, gymnasium.spaces.Text):
            self.names, self._first = [], None
        else:
            raise ConfigError(
                f"the actions of '{id}' are {space}, which cannot be written as text",
                fix="use an environment with Discrete or Text actions",
            )
        self.intro = prompt if prompt is not None else self._intro(id)
        self._total, self._steps = 0.0, 0

    def _intro(self, id: str) -> str:
        if not self.names:
            return f"You play {id}."
        return f"You play {id}. Answer with one of: {', '.join(self.names)}."

    async def reset(self, seed: int) -> list[Message]:
        observation, _ = await asyncio.to_thread(self.env.reset, seed=seed)
        self._total, self._steps = 0.0, 0
        return [{"role": "user", "content": f"{self.intro}\n{self._shown(observation)}".strip()}]

    async def step(self, turn: AssistantTurn) -> Step:
        action = self._action(turn.content)
        self._steps += 1
        if action is None:
            facts = {"invalid_action": 1.0, "solved": float(self._total > 0), "steps": float(self._steps)}
            return Step.says(f"answer with one of: {', '.join(self.names)}", facts=facts)
        observation, reward, terminated, truncated, _ = await asyncio.to_thread(self.env.step, action)
        self._total += float(reward)
        facts = {"solved": float(self._total > 0), "steps": float(self._steps), "invalid_action": 0.0}
        if terminated or truncated:
            return Step(reward=float(reward), done=True, facts=facts)
        return Step.says(self._shown(observation), reward=float(reward), facts=facts)

    async def close(self) -> None:
        self.env.close()

    def _action(self, text: str) -> Any:
        if self._first is None:
            return text
        words = "|".join(re.escape(name) for name in sorted(self.names, key=len, reverse=True))
        actions = re.findall(rf"(?<!\w)(?:{words})(?!\w)", text, re.IGNORECASE)
        lowered = [name.lower() for name in self.names]
        return self._first + lowered.index(actions[-1].lower()) if actions else None

    def _shown(self, observation: Any) -> str:
        if not self._renders:
            return str(observation)
        # the player's position is marked by colour, which plain text lacks: put it into brackets
        rendered = str(self.env.render()).strip()
        return _ANSI.sub(lambda mark: "]" if mark[1] in ("", "0") else "[", rendered)
