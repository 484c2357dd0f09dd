"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): groups that teach nothing are replaced.

A group whose answers are all equally good has advantage 0 everywhere. Without it the batch would be smaller than it looks;
with it replaced by the group of another prompt, every group counts. Prompts are tried in the order of the data, and exactly
as many as are missing: the batch is the first useful groups of that order, whatever was finished first, and none is thrown
away.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from hone.cluster.runtime import AnyBatch
from hone.config.algorithm import FilterGroupsConfig
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore

SHOWN = 4


class GroupFilter:
    """Scores groups as they are finished, says which to evict, and stops when too many were tried.

    Args:
        config: the block ``algorithm.filter_groups``.
        score: adds the scores to a batch.
        values_of: of a scored batch and the name of a metric the value of each row; and, when no score has the metric, the
            names of those there are.
        batch_size: groups a step.
    """

    def __init__(
        self,
        config: FilterGroupsConfig,
        score: Callable[[AnyBatch], Awaitable[AnyBatch]],
        values_of: Callable[[AnyBatch, str | None], Awaitable[tuple[list[float], list[str] | None]]],
        batch_size: int,
    ) -> None:
        self.config, self.score, self.values_of, self.batch_size = config, score, values_of, batch_size
        self.tried = 0
        """Groups judged this step."""
        self.judged: tuple[list[str], list[float]] = ([], [])
        """Uid and value of every answer judged last, those of evicted groups too."""
        self._evicted: Counter[float] = Counter()  # the value that all answers of an evicted group share
        self._samples = 0

    def begin(self) -> None:
        """A new step: nothing has been tried."""
        self.tried = self._samples = 0
        self._evicted.clear()

    async def judge(self, batch: AnyBatch) -> tuple[AnyBatch, list[str]]:
        """Score finished groups; returns them with their scores, and the uids of those to evict.

        Raises:
            ConfigError: the reward function returns no term of the name ``metric``.
            RewardError: too many answers cannot be scored.
        """
        batch = await self.score(batch)
        values, instead = await self.values_of(batch, self.config.metric)
        self._check_metric(instead)
        self.judged = list(batch.uids), values
        groups: dict[str, list[float]] = {}
        for uid, value in zip(batch.uids, values, strict=True):
            groups.setdefault(uid, []).append(value)
        useless = [uid for uid, found in groups.items() if len(set(found)) == 1]
        self._evicted.update(groups[uid][0] for uid in useless)
        self._samples += sum(len(groups[uid]) for uid in useless)
        self.tried += len(groups)
        return batch, useless

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

    def _check_metric(self, instead: list[str] | None) -> None:
        if instead is None:
            return
        raise ConfigError(
            f"the reward function returns no term '{self.config.metric}'; it returns {instead or 'a plain number'}",
            why="dynamic sampling could not tell a useful group from a useless one",
            fix=f"algorithm.filter_groups.metric={instead[0] if instead else 'null'}",
            where="algorithm.filter_groups.metric",
        )
