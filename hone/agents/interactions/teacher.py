"""Simulated user that checks the answer and lets the model try again if it is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hone.agents.interactions.base import Interaction, Reply
from hone.agents.messages import Message
from hone.data.types import Sample
from hone.errors import ConfigError
from hone.rewards.outcome import to_score
from hone.rewards.scorers import scorer_for
from hone.rewards.scorers.base import SCORERS


class Teacher(Interaction):
    """User that answers a wrong solution with ``wrong``, for at most ``tries`` answers.

    Config: ``scorer`` (null: the scorer of the row's data source), ``tries`` (maximum number of answers), ``wrong`` (reply to a wrong
    answer), ``right_at`` (least score of a right answer), ``later`` (factor on the reward for each further try).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        defaults = {"scorer": None, "tries": 2, "wrong": "That is wrong. Try again.", "right_at": 1.0, "later": 0.5}
        unknown = sorted(set(config) - set(defaults))
        if unknown:
            raise TypeError(f"unknown setting '{unknown[0]}'; known settings: {', '.join(defaults)}")
        self.settings = defaults | config

    async def start(self, sample: Sample, **kwargs: Any) -> dict[str, Any]:
        """Choose the scorer and begin to count tries."""
        name = self.settings["scorer"]
        scorer = SCORERS.get(name) if name else scorer_for(sample.data_source)
        if scorer is None:
            raise ConfigError(
                f"no scorer is registered for data_source '{sample.data_source}'",
                why="the teacher could not score the answer",
                fix=f"config: {{scorer: {SCORERS.names()[0]}}} in the interaction file",
                where="actor_rollout_ref.rollout.multi_turn.interaction_config_path",
                code="R43",
            )
        return {"sample": sample, "scorer": scorer, "tries": 0}

    async def reply(self, state: dict[str, Any], messages: Sequence[Message]) -> Reply:
        """Score the last answer."""
        sample, scorer = state["sample"], state["scorer"]
        state["tries"] += 1
        answer = str(messages[-1].get("content") or "")
        value = await asyncio.to_thread(
            scorer.compute, sample.data_source, answer, sample.ground_truth, sample.extra_info
        )
        score = to_score(value)
        if score.error is not None:
            raise RuntimeError(f"scorer '{scorer.name}' {score.error}")
        reward = score.total * self.settings["later"] ** (state["tries"] - 1)
        right = score.total >= self.settings["right_at"]
        done = right or state["tries"] >= self.settings["tries"]
        return Reply(None if done else self.settings["wrong"], reward if done else 0.0, done, {"solved": float(right)})
