"""Comparison of two versions of a reward on the rollouts that a run has stored, scored again."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from hone.algorithms.advantages.group_relative import normalised
from hone.algorithms.advantages.groups import Groups
from hone.apps.lab.compare import find_run
from hone.apps.lab.rewards.stored import stored_episodes
from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.rewards.manager import RewardManager
from hone.rewards.placement import share_rewards
from hone.rewards.score import Score

EPSILON = 1e-6
"""Differences of advantages up to this count as rounding."""


@dataclass(frozen=True)
class ScoredTwice:
    """One stored episode with its score under the old and the new reward; None without a verdict."""

    step: int
    uid: str
    index: int
    tokens: int  # number of sampled tokens
    text: str
    old: float | None
    new: float | None
    old_right: bool | None  # whether the episode passes
    new_right: bool | None

    @property
    def flipped(self) -> bool:
        """True if the two verdicts differ, or only one of them exists."""
        return self.old_right != self.new_right


@dataclass(frozen=True)
class Difference:
    """Effect of a change of the reward on an episode: GRPO advantages before and after it."""

    episode: ScoredTwice
    old_advantage: float | None
    new_advantage: float | None

    @property
    def change(self) -> float:
        """Absolute change of the advantage; a missing one counts as 0, because the episode is left out."""
        return abs((self.new_advantage or 0.0) - (self.old_advantage or 0.0))

    def as_json(self) -> dict[str, Any]:
        return {**vars(self.episode), "old_advantage": self.old_advantage, "new_advantage": self.new_advantage}


@dataclass(frozen=True)
class Comparison:
    """Differences between two rewards over the groups of a run."""

    episodes: int
    groups: int
    flipped: float  # share of episodes whose verdict differs
    reordered_pairs: float  # share of the pairs of a group whose order differs; a tie on one side counts as different
    reordered_groups: float  # share of groups with such a pair
    advantage_signs: float  # share of episodes whose GRPO advantage has another sign
    tokens: float  # share of the sampled tokens whose advantage differs
    # sum over tokens of the advantages' absolute change, relative to the sum of both advantages' sizes: 0 if the past
    # updates would be the same, 1 if no part of them would
    gradient: float
    differences: list[Difference]  # episodes whose advantage or verdict differs, the largest change first

    def shares(self) -> dict[str, float]:
        names = ("flipped", "reordered_pairs", "reordered_groups", "advantage_signs", "tokens", "gradient")
        return {name: getattr(self, name) for name in names}


def compare(episodes: Sequence[ScoredTwice]) -> Comparison:
    """Compare the two scores of every episode, within the groups of each step."""
    groups: dict[tuple[int, str], list[ScoredTwice]] = defaultdict(list)
    for episode in episodes:
        groups[episode.step, episode.uid].append(episode)
    every: list[Difference] = []
    pairs = reordered = touched = 0
    for group in groups.values():
        old, new = advantages([e.old for e in group]), advantages([e.new for e in group])
        every += [Difference(*values) for values in zip(group, old, new, strict=True)]
        judged = [e for e in group if e.old is not None and e.new is not None]
        moved = [_order(a.old, b.old) != _order(a.new, b.new) for a, b in combinations(judged, 2)]
        pairs, reordered, touched = pairs + len(moved), reordered + sum(moved), touched + any(moved)
    tokens = max(1, sum(d.episode.tokens for d in every))
    sizes = sum(d.episode.tokens * (abs(d.old_advantage or 0.0) + abs(d.new_advantage or 0.0)) for d in every)
    changed = [d for d in every if d.change > EPSILON]
    return Comparison(
        len(every),
        len(groups),
        _share(sum(d.episode.flipped for d in every), len(every)),
        _share(reordered, pairs),
        _share(touched, len(groups)),
        _share(sum(_sign(d.old_advantage) != _sign(d.new_advantage) for d in every), len(every)),
        _share(sum(d.episode.tokens for d in changed), tokens),
        _share(sum(d.episode.tokens * d.change for d in every), sizes),
        sorted((d for d in every if d.change > EPSILON or d.episode.flipped), key=lambda d: -d.change),
    )


def advantages(scores: Sequence[float | None]) -> list[float | None]:
    """Return GRPO's advantages of a group, from those with a verdict; None for the others and where only one has a verdict."""
    present = torch.tensor([score for score in scores if score is not None], dtype=torch.float64)
    if len(present) < 2:
        return [None] * len(scores)
    group = Groups.from_ids([0] * len(present), torch.ones(len(present), 1))
    values = iter(normalised(present, group, by_std=True, epsilon=EPSILON).tolist())
    return [None if score is None else next(values) for score in scores]


def _order(first: float | None, second: float | None) -> int:
    assert first is not None and second is not None
    return (first > second) - (first < second)


def _sign(value: float | None) -> int:
    return 0 if value is None or abs(value) <= EPSILON else (1 if value > 0 else -1)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


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
