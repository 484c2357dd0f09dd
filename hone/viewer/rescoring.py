"""Scores of a run's answers under an edited reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.viewer.run import ViewedRun, plain

SHOWN = 200


def rescore(run: ViewedRun, reward: str) -> dict[str, Any]:
    """Score all stored answers again, as `hone reward diff stored REWARD` does.

    Args:
        run: the run.
        reward: ``FILE:NAME`` of a function, or the name of a scorer.

    Returns:
        ``episodes``, ``groups``, shares of what would be different, and ``differences``, the largest change first.

    Raises:
        HoneError: the reward cannot be loaded, or the run has no rollouts.
    """
    from hone.config.reward import RewardConfig
    from hone.rewards.comparison import compare
    from hone.rewards.rescoring import rescore_run

    config = RewardConfig()
    file, _, name = reward.strip().rpartition(":")
    if file:
        if not Path(file).expanduser().is_file():
            raise HoneError(f"no file '{file}'", fix="FILE:NAME of a function on this machine", code="E-view-reward")
        config.custom_reward_function.path, config.custom_reward_function.name = str(Path(file).expanduser()), name
    elif name:
        config.scorer = name
    else:
        raise HoneError(
            "no reward is named", fix="FILE:NAME of a function, or the name of a scorer", code="E-view-reward"
        )
    comparison = compare(rescore_run(str(run.path), run.path.parent, None, config))
    differences = [difference.as_json() for difference in comparison.differences[:SHOWN]]
    counts = {"episodes": comparison.episodes, "groups": comparison.groups}
    return plain({**counts, **comparison.shares(), "changed": len(comparison.differences), "differences": differences})
