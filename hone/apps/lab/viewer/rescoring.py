"""Scores of a run's answers under an edited reward."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.apps.lab.viewer.run import ViewedRun, plain
from hone.config.reward import CustomRewardConfig, RewardConfig
from hone.errors import HoneError

SHOWN = 200


def reward_config(named: str) -> RewardConfig:
    """Return the configuration of a reward ``FILE:NAME`` that `hone view --reward` names."""
    file, _, name = named.strip().rpartition(":")
    path = Path(file).expanduser()
    if not file or not path.is_file():
        raise HoneError(f"no file '{file}'", fix="--reward FILE:NAME of a function", code="E-view-reward")
    return RewardConfig(custom_reward_function=CustomRewardConfig(path=str(path.resolve()), name=name))


def rescore(run: ViewedRun, reward: str, named: Mapping[str, RewardConfig]) -> dict[str, Any]:
    """Score all stored answers again, as `hone reward diff stored REWARD` does, by one of ``named`` or a built-in scorer.

    ``episodes``, ``groups``, shares of what would be different, and ``differences``, the largest change first.
    """
    from hone.apps.lab.rewards.comparison import compare, rescore_run
    from hone.rewards.scorers import SCORERS

    config = RewardConfig(scorer=reward) if reward in SCORERS else named.get(reward)
    if config is None:
        raise HoneError(
            f"'{reward}' is not a built-in scorer, and the viewer was not started with it",
            why="a caller that has the link could run any file of this machine",
            fix="start it with hone view --reward FILE:NAME",
            code="E-view-reward",
        )
    comparison = compare(rescore_run(str(run.path), run.path.parent, None, config))
    differences = [difference.as_json() for difference in comparison.differences[:SHOWN]]
    counts = {"episodes": comparison.episodes, "groups": comparison.groups}
    return plain({**counts, **comparison.shares(), "changed": len(comparison.differences), "differences": differences})
