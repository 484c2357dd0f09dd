"""Keys of the episodes that `hone eval` plays, from the model's run and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.config.load import load_config
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
            f"'{word}' is not a key of episodes",
            why="`hone eval` takes a model, data and options; its keys name files and columns, or configure episodes",
            fix="use a key of multi_turn or agent, as in multi_turn.enable=true multi_turn.tool_config_path=tools.yaml",
        )
    sign = word[: len(word) - len(word.lstrip("+~"))]
    return f"{sign}{_ROLLOUT}{key}"
