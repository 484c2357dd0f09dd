"""Keys of `hone eval`: of the episodes that it plays, from the model's run and the command line, and of the reward."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.config.load import load_config
from hone.config.reward import RewardConfig
from hone.config.tree import RLConfig
from hone.errors import ConfigError

_BLOCKS = ("multi_turn", "agent")
_ROLLOUT = "actor_rollout_ref.rollout."


@dataclass
class EpisodeKeys:
    """Configuration of episodes.

    Attributes:
        template_kwargs: extra arguments of the chat template.
        run: directory of the run whose configuration is used, or None.
        strings_as_messages: as ``data.strings_as_messages``.
    """

    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    run: Path | None = None
    strings_as_messages: bool = True


def episode_keys(model: Path, overrides: Sequence[str]) -> EpisodeKeys:
    """Return the episode keys of a model: those of its run, changed by the overrides.

    Args:
        model: directory of the model.
        overrides: keys of the blocks ``multi_turn`` and ``agent``, as in ``multi_turn.enable=true``.

    Raises:
        ConfigError: a key of another block, or an invalid value.
    """
    run = run_of(model)
    words = [_full_override(word) for word in overrides]
    where = {} if run is None else {"config_path": run, "config_name": "config"}
    config = load_config(RLConfig, words, **where)
    rollout = config.actor_rollout_ref.rollout
    data = config.data
    return EpisodeKeys(
        rollout.multi_turn, rollout.agent, data.apply_chat_template_kwargs, run, data.strings_as_messages
    )


def reward_of(words: Sequence[str]) -> tuple[RewardConfig, list[str]]:
    """Return the reward that the keys of the block ``reward`` set, and the other words.

    Raises:
        ConfigError: a key of ``reward`` is unknown, or its value is wrong.
    """
    of_reward = [word for word in words if re.match(r"[+~]*reward[.=]", word)]
    reward = load_config(RLConfig, of_reward).reward
    if reward.reward_model.enable:
        raise ConfigError(
            "`hone eval` scores without a reward model",
            where="reward.reward_model.enable",
            fix="a scorer or function, as in reward=exact_match",
        )
    return reward, [word for word in words if word not in of_reward]


def run_of(model: Path) -> Path | None:
    """Return the directory of the `hone train` run that contains a model, or None."""
    for folder in model.absolute().parents:
        config_file = folder / "config.yaml"
        if config_file.is_file() and (folder / "run.json").is_file():
            return folder if "actor_rollout_ref" in (yaml.safe_load(config_file.read_text()) or {}) else None
    return None


def _full_override(word: str) -> str:
    """Return an override with its full key."""
    key = word.lstrip("+~").removeprefix(_ROLLOUT)
    if key.startswith("data.strings_as_messages="):
        return word
    if key.partition(".")[0] not in _BLOCKS:
        raise ConfigError(
            f"'{word}' is not a key of an evaluation",
            why="`hone eval` takes a model, data and options; its keys configure episodes and the reward",
            fix="use a key of multi_turn, agent or reward, as in multi_turn.enable=true reward=[exact_match,rewards.py:short]",
        )
    sign = word[: len(word) - len(word.lstrip("+~"))]
    return f"{sign}{_ROLLOUT}{key}"
