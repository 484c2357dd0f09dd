"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): groups that teach nothing are replaced.

A group whose answers are all equally good has advantage 0 everywhere. Without it the batch would be smaller than it looks;
with it replaced by the group of another prompt, every group counts. Prompts are tried in the order of the data, and exactly
as many as are missing: the batch is the first useful groups of that order, whatever was finished first, and none is thrown
away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from hone.config.algorithm import FilterGroupsConfig
from hone.data.types import Trajectory
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore
from hone.rewards.score import Score
from hone.trainers.group_buffer import Group

SHOWN = 4


class GroupFilter:
    """Scores groups as they are finished, says which to evict, and stops when too many were tried.

    Args:
        config: the block ``algorithm.filter_groups``.
        score: scores trajectories, in order.
        batch_size: groups a step.
    """

    def __init__(
        self,
        config: FilterGroupsConfig,
        score: Callable[[Sequence[Trajectory]], Awaitable[list[Score]]],
        batch_size: int,
    ) -> None:
        self.config, self.score, self.batch_size = config, score, batch_size
        self.tried = 0
        """Groups judged this step."""
        self._evicted: Counter[float] = Counter()  # the value that all answers of an evicted group share
        self._samples = 0

    def begin(self) -> None:
        """A new step: nothing has been tried."""
        self.tried = self._samples = 0
        self._evicted.clear()

    async def useless(self, groups: Sequence[Group]) -> list[str]:
        """Score the groups (the scores stay with them) and return the uids of those to evict.

        Raises:
            ConfigError: the reward function returns no term of the name ``metric``.
            RewardError: too many answers cannot be scored.
        """
        scores = await self.score([trajectory for group in groups for trajectory in group.trajectories])
        self._check_metric(scores)
        remaining = iter(scores)
        evicted = []
        for group in groups:
            group.scores = [next(remaining) for _ in group.trajectories]
            values = {self._value(score) for score in group.scores}
            if len(values) == 1:
                evicted.append(group.uid)
                self._evicted[values.pop()] += 1
                self._samples += len(group.scores)
        self.tried += len(groups)
        return evicted

    def check_budget(self, missing: int) -> None:
        """Make sure that ``missing`` more groups may be tried.

        Raises:
            ConfigError: they would be more than ``max_num_gen_batches`` allows.
        """
        limit = self.config.max_num_gen_batches * self.batch_size
        if self.tried + missing <= limit:
            return
        common = ", ".join(f"{count} all {value:g}" for value, count in self._evicted.most_common(SHOWN))
        others = len(self._evicted) - SHOWN
        raise ConfigError(
            f"dynamic sampling: {self.tried} groups were tried for one step, and in {self.batch_size - missing} of the "
            f"{self.batch_size} needed the answers differ in '{self._name}'. Of the others: {common}"
            + (f", and {others} more values" if others > 0 else ""),
            why="a group whose answers are all equally good has advantage 0; "
            f"max_num_gen_batches={self.config.max_num_gen_batches} allows {limit} groups a step",
            fix="problems that are neither too hard nor solved, or a larger actor_rollout_ref.rollout.n; or "
            f"algorithm.filter_groups.max_num_gen_batches={2 * self.config.max_num_gen_batches}; or "
            "algorithm.filter_groups.enable=false",
            where="algorithm.filter_groups",
            code="E-filter-groups",
        )

    def report(self, metrics: MetricStore) -> None:
        """Add the numbers of the step as ``training/filter_groups/*``."""
        evicted = sum(self._evicted.values())
        metrics.add("training/filter_groups/tried_groups", self.tried)
        metrics.add("training/filter_groups/evicted_samples", self._samples)
        metrics.add("training/filter_groups/evicted_ratio", evicted / max(1, self.tried))
        if evicted:
            total = sum(value * count for value, count in self._evicted.items())
            metrics.add("training/filter_groups/evicted_value", total / evicted)

    @property
    def _name(self) -> str:
        return self.config.metric or "reward"

    def _value(self, score: Score) -> float:
        return score.quality if self.config.metric is None else score.terms.get(self.config.metric, 0.0)

    def _check_metric(self, scores: Sequence[Score]) -> None:
        sound = [score for score in scores if score.error is None]
        if self.config.metric is None or not sound or any(self.config.metric in score.terms for score in sound):
            return
        names = sorted({name for score in sound for name in score.terms})
        raise ConfigError(
            f"the reward function returns no term '{self.config.metric}'; it returns {names or 'a plain number'}",
            why="dynamic sampling could not tell a useful group from a useless one",
            fix=f"algorithm.filter_groups.metric={names[0] if names else 'null'}",
            where="algorithm.filter_groups.metric",
        )
