"""Simulated users from a YAML file (``multi_turn.interaction_config_path``).

interaction:
  - name: teacher                       # built in: checks answers, lets the model try again
    config: {tries: 3}
  - name: customer                      # your class: Customer(config)
    class_name: my_users.Customer
    config: {patience: 5}
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hone.agents.interactions.base import Interaction, Reply
from hone.agents.messages import Message
from hone.agents.tools.loading import read_yaml
from hone.data.types import Sample
from hone.errors import ConfigError, HoneError
from hone.registry import Registry, imported
from hone.rewards.scorers import scorer_for
from hone.rewards.scorers.base import SCORERS
from hone.rewards.worker import to_score
from hone.user_objects import PREFIX, is_user_object


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


PATH_KEY = "actor_rollout_ref.rollout.multi_turn.interaction_config_path"
INTERACTIONS: Registry[type[Interaction]] = Registry("built-in interaction", key=PATH_KEY)
_ = INTERACTIONS.register("teacher")(Teacher)


def load_interactions(path: str | None) -> dict[str, Interaction]:
    """Return the simulated users of a file, or the one of a class of this process, by name."""
    if path is None:
        raise ConfigError(
            "the loop 'interaction' needs a file of simulated users, and none is given",
            why="no user would answer the model",
            fix=f"{PATH_KEY}=FILE.yaml",
            code="R33",
        )
    if is_user_object(path):
        name = path.removeprefix(PREFIX)
        return {name: _user(_imported_class(path, PATH_KEY), name, {}, PATH_KEY)}
    content = read_yaml(Path(path), PATH_KEY)
    entries = content.get("interaction") if isinstance(content, dict) else content
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"'{path}' lists no users", fix="add interaction:\n    - name: teacher", where=PATH_KEY)
    users: dict[str, Interaction] = {}
    for number, entry in enumerate(entries):
        where = f"{path}, user {number + 1}"
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or entry["name"] in users:
            raise ConfigError(
                f"{entry!r} has no name, or the name of an earlier user",
                where=where,
                fix="give it a unique name: - name: teacher",
            )
        users[entry["name"]] = _user(_class(entry, where), entry["name"], dict(entry.get("config") or {}), where)
    return users


def _class(entry: dict, where: str) -> type[Interaction]:
    if "class_name" not in entry:
        return INTERACTIONS.get(entry["name"])
    module, _, name = str(entry["class_name"]).rpartition(".")
    return _imported_class(f"{module}:{name}", where)


def _imported_class(path: str, where: str) -> type[Interaction]:
    cls = imported(path, where)
    if not (inspect.isclass(cls) and issubclass(cls, Interaction)):
        raise ConfigError(
            f"{path} is not a subclass of Interaction",
            where=where,
            fix="derive it from hone.agents.interactions.Interaction",
        )
    return cls


def _user(cls: type[Interaction], name: str, config: dict, where: str) -> Interaction:
    try:
        user = cls(config)
    except HoneError:
        raise
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"the user cannot be made: {error}", where=where, fix="correct its config") from error
    user.name = name
    return user
