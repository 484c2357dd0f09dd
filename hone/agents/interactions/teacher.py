"""A user who checks the answer and, where it is wrong, says so and lets the model try again."""

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
    """Says "wrong" and why it matters, ``tries`` times at most.

    Config: ``scorer`` (null: the one of the row's data source), ``tries`` (answers in all), ``wrong`` (what is said), ``right_at``
    (the score from which an answer is right), ``later`` (factor on the reward for each further try).
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        known = {"scorer": None, "tries": 2, "wrong": "That is wrong. Try again.", "right_at": 1.0, "later": 0.5}
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise TypeError(f"unknown setting '{unknown[0]}'; there are {', '.join(known)}")
        self.settings = known | config

    async def start(self, sample: Sample, **kwargs: Any) -> dict[str, Any]:
        """Count tries."""
        name = self.settings["scorer"]
        scorer = SCORERS.get(name) if name else scorer_for(sample.data_source)
        if scorer is None:
            raise ConfigError(
                f"no scorer knows data_source '{sample.data_source}'",
                why="the teacher could not tell right from wrong",
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
        found = await asyncio.to_thread(
            scorer.compute, sample.data_source, answer, sample.ground_truth, sample.extra_info
        )
        score = to_score(found)
        if score.error is not None:
            raise RuntimeError(f"scorer '{scorer.name}' {score.error}")
        reward = score.total * self.settings["later"] ** (state["tries"] - 1)
        right = score.total >= self.settings["right_at"]
        done = right or state["tries"] >= self.settings["tries"]
        return Reply(None if done else self.settings["wrong"], reward if done else 0.0, done, {"solved": float(right)})
