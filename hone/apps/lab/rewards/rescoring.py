"""Scores of a run's stored episodes under other rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hone.apps.lab.compare import find_run
from hone.apps.lab.rewards.comparison import ScoredTwice
from hone.apps.lab.rewards.stored import stored_episodes
from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.rewards.manager import RewardManager
from hone.rewards.placement import share_rewards
from hone.rewards.score import Score

STORED = "stored"
"""Name of the scores that the run itself gave."""


def rescore_run(run: str, root: Path, old: RewardConfig | None, new: RewardConfig | None) -> list[ScoredTwice]:
    """Score the stored training episodes of a run, by its directory or name below ``root``, with two rewards; None: the stored scores."""
    chosen = find_run(run, root)
    files = [str(file) for file in _listed(chosen.config.get("data.train_files"))]
    key = str(chosen.config.get("data.reward_fn_key") or "data_source")
    rows = list(stored_episodes(chosen.path / "rollouts", files, key))
    # a prompt that returns in a later step has its uid again, and the segments of an episode are joined by uid
    trajectories = [replace(trajectory, uid=f"{trajectory.uid} step {step}") for step, _, trajectory in rows]
    recorded = [_recorded(record) for _, record, _ in rows]
    columns = [recorded if config is None else scores_of(config, trajectories) for config in (old, new)]
    return [
        ScoredTwice(
            step,
            record["uid"],
            trajectory.index,
            sum(trajectory.response_mask),
            trajectory.text,
            first.verdict,
            second.verdict,
            None if first.error is not None else first.passes,
            None if second.error is not None else second.passes,
        )
        for (step, record, trajectory), first, second in zip(rows, *columns, strict=True)
        if trajectory.part == 0
    ]


def scores_of(config: RewardConfig, trajectories: Sequence[Trajectory]) -> list[Score]:
    """Return the score of every trajectory; the segments of an episode share one.

    Raises:
        RewardError: the reward cannot be loaded, or a data source has no scorer.
    """
    manager = RewardManager(replace(config, max_no_verdict_rate=1.0))
    try:
        return share_rewards(trajectories, asyncio.run(manager.score(trajectories)))
    finally:
        manager.close()


def _recorded(record: dict) -> Score:
    return Score(record["score"] or 0.0, record["terms"], error=record["error"])


def _listed(files: object) -> list[object]:
    return list(files) if isinstance(files, list | tuple) else [files] if files else []
