"""Training step as a list of stages, each callable separately, timed, and skipped explicitly."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hone.cluster.any_batch import AnyBatch
from hone.data.batch import Batch
from hone.errors import ConfigError
from hone.insight import activity
from hone.insight.metrics import MetricStore

StageFn = Callable[[AnyBatch], AnyBatch | Awaitable[AnyBatch]]
SAMPLED = ("uid", "trajectory", "response_ids", "response_mask", "rollout_log_probs")
"""Columns of played episodes."""
SCORED = ("score", "token_level_scores", "token_level_rewards")
"""Columns of their scores."""


@dataclass(frozen=True)
class Stage:
    """Stage of a training step.

    Attributes:
        name: name of the stage, as in ``timing_s/<name>``.
        run: function that takes the batch and returns it, with more columns or unchanged.
        needs: required columns.
        adds: columns that it adds.
        when: True if the algorithm needs the stage; otherwise it is not run.
        supplied_by: settings that supply a missing column, for the error message.
        switch: setting that activates the stage.
    """

    name: str
    run: StageFn
    needs: tuple[str, ...] = ()
    adds: tuple[str, ...] = ()
    when: bool = True
    supplied_by: str = ""
    switch: str = ""


def check_stages(stages: Sequence[Stage]) -> None:
    """Check that every active stage has its columns, before the first token is generated.

    Raises:
        ConfigError: no earlier stage adds a column that a stage needs.
    """
    present: set[str] = set()
    for stage in (stage for stage in stages if stage.when):
        missing = [name for name in stage.needs if name not in present]
        if missing:
            adding_stages = [maker for maker in stages if set(missing) & set(maker.adds)]
            switches = ", ".join(maker.switch for maker in adding_stages if maker.switch and not maker.when)
            names = ", ".join(maker.name for maker in adding_stages)
            raise ConfigError(
                f"stage '{stage.name}' needs {missing}, which no active stage adds",
                why="the step would fail after generation",
                fix=stage.supplied_by or switches or f"enable the stage that adds it: {names or 'none exists'}",
            )
        present.update(stage.adds)


async def run_stages(stages: Sequence[Stage], metrics: MetricStore) -> AnyBatch:
    """Run the active stages in order, timing each."""
    batch: AnyBatch = Batch({})
    for stage in stages:
        if stage.when:
            with activity.doing(stage.name), metrics.timer(stage.name):
                result = stage.run(batch)
                batch = await result if inspect.isawaitable(result) else result
    return batch
