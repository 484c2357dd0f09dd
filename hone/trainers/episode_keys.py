"""Which episodes `hone eval` plays: as the run did whose model it is, or as keys on the command line say."""

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
    """How episodes are played.

    Attributes:
        multi_turn: the block ``multi_turn``.
        agent: the block ``agent``.
        template_kwargs: extra arguments of the chat template.
        run: the run whose configuration was taken up, None without.
    """

    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    run: Path | None = None


def episode_keys(model: Path, overrides: Sequence[str]) -> EpisodeKeys:
    """The keys that hold for a model: those of the run that made it, and over them the overrides.

    Args:
        model: its directory.
        overrides: keys of the blocks ``multi_turn`` and ``agent``, as in ``multi_turn.enable=true``.

    Raises:
        ConfigError: a key of another block, or a value that does not do.
    """
    run = run_of(model)
    words = [_whole(word) for word in overrides]
    where = {} if run is None else {"config_path": run, "config_name": "config"}
    config = load_config(RLConfig, words, **where)
    rollout = config.actor_rollout_ref.rollout
    return EpisodeKeys(rollout.multi_turn, rollout.agent, config.data.apply_chat_template_kwargs, run)


def run_of(model: Path) -> Path | None:
    """The directory of the `hone train` run in which a model lies, or None."""
    for folder in model.absolute().parents:
        kept = folder / "config.yaml"
        if kept.is_file() and (folder / "run.json").is_file():
            return folder if "actor_rollout_ref" in (yaml.safe_load(kept.read_text()) or {}) else None
    return None


def _whole(word: str) -> str:
    """An override by its whole path."""
    key = word.lstrip("+~").removeprefix(_ROLLOUT)
    if key.partition(".")[0] not in _BLOCKS:
        raise ConfigError(
            f"'{word}' is no key of episodes",
            why="`hone eval` takes a model, data and options; keys say how episodes of several turns are played",
            fix="a key of multi_turn or agent, as in multi_turn.enable=true multi_turn.tool_config_path=tools.yaml",
        )
    sign = word[: len(word) - len(word.lstrip("+~"))]
    return f"{sign}{_ROLLOUT}{key}"
