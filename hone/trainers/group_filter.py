"""Dynamic sampling (DAPO, Yu et al. 2025, arXiv:2503.14476, section 3.2): replacement of groups without learning signal.

A group of equally good answers has advantage 0 everywhere, so the effective batch would be smaller. The groups of further prompts
replace such groups. Prompts are tried in data order, and only as many as are missing. So the batch is the first useful groups of
that order, independent of completion order, and no useful group is discarded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable

from hone.cluster.handles import AnyBatch
from hone.config.algorithm import FilterGroupsConfig
from hone.errors import ConfigError
from hone.insight.metrics import MetricStore

MAX_SHOWN_VALUES = 4


class GroupFilter:
    """Filter that scores finished groups, selects those to evict, and stops after too many tries.

    Args:
        values_of: function of a scored batch and a metric's name that returns the value of each row, None without a verdict. If no
            score has the metric, it also returns the names of the existing ones.
    """

    def __init__(
        self,
        config: FilterGroupsConfig,
        score: Callable[[AnyBatch], Awaitable[AnyBatch]],
        values_of: Callable[[AnyBatch, str | None], Awaitable[tuple[list[float | None], list[str] | None]]],
        batch_size: int,
    ) -> None:
        self.config, self.score, self.values_of, self.batch_size = config, score, values_of, batch_size
        self.tried = 0
        """Number of groups judged in this step."""
        self.judged: tuple[list[str], list[float]] = ([], [])
        """Uid and value of every answer judged last, including evicted groups."""
        self._evicted: Counter[float] = Counter()  # the value that all answers of an evicted group share
        self._samples = 0

    def begin(self) -> None:
        """Start a new step with no groups tried."""
        self.tried = self._samples = 0
        self._evicted.clear()

    async def judge(self, batch: AnyBatch) -> tuple[AnyBatch, list[str]]:
        """Score finished groups; return the scored batch and the uids to evict.

        Raises:
            ConfigError: the reward function returns no term named ``metric``.
            RewardError: too many answers cannot be scored.
        """
        batch = await self.score(batch)
        values, alternatives = await self.values_of(batch, self.config.metric)
        self._check_metric(alternatives)
        pairs = [(uid, value) for uid, value in zip(batch.uids, values, strict=True) if value is not None]
        self.judged = [uid for uid, _ in pairs], [value for _, value in pairs]
        groups: dict[str, list[float]] = {}
        for uid, value in pairs:
            groups.setdefault(uid, []).append(value)
        evicted = [uid for uid, group_values in groups.items() if len(set(group_values)) == 1 < len(group_values)]
        self._evicted.update(groups[uid][0] for uid in evicted)
        self._samples += sum(len(groups[uid]) for uid in evicted)
        self.tried += len(groups)
        return batch, evicted

    def check_budget(self) -> None:
        """Check that more groups may be tried, after some were evicted.

        ``max_num_gen_batches`` bounds the groups tried for each useful one. Asynchronous rollout may finish several batches in one step.

        Raises:
            ConfigError: more were evicted.
        """
        evicted = sum(self._evicted.values())
        useful, limit = self.tried - evicted, self.config.max_num_gen_batches
        if evicted <= (limit - 1) * max(self.batch_size, useful):
            return
        common = ", ".join(f"{count} all {value:g}" for value, count in self._evicted.most_common(MAX_SHOWN_VALUES))
        others = len(self._evicted) - MAX_SHOWN_VALUES
        raise ConfigError(
            f"dynamic sampling: {self.tried} groups were tried in one step, but only in {useful} of them do the answers differ in "
            f"'{self._name}', and a step needs {self.batch_size}. The others: {common}"
            + (f", and {others} more values" if others > 0 else ""),
            why="a group whose answers are all equally good has advantage 0; "
            f"max_num_gen_batches={limit} allows {limit * self.batch_size} groups per step",
            fix="use problems that are neither too hard nor solved, or a larger actor_rollout_ref.rollout.n; or "
            f"algorithm.filter_groups.max_num_gen_batches={2 * limit}; or "
            "algorithm.filter_groups.enable=false",
            where="algorithm.filter_groups",
            code="E-filter-groups",
        )

    def report(self, metrics: MetricStore) -> None:
        """Add the metrics of the step as ``training/filter_groups/*``."""
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

    def _check_metric(self, alternatives: list[str] | None) -> None:
        if alternatives is None:
            return
        raise ConfigError(
            f"the reward function returns no term '{self.config.metric}'; it returns {alternatives or 'a plain number'}",
            why="dynamic sampling needs this term to find groups without learning signal",
            fix=f"algorithm.filter_groups.metric={alternatives[0] if alternatives else 'null'}",
            where="algorithm.filter_groups.metric",
        )
