"""Training step as a list of stages, each callable separately, timed, and skipped explicitly; and its data flow, to be drawn."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.cluster.handles import AnyBatch, concat_batches
from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.data.batch import Batch
from hone.errors import ConfigError
from hone.insight import activity
from hone.insight.metrics import MetricStore
from hone.trainers.rollouter import Group

SAMPLED = ("uid", "trajectory", "response_ids", "response_mask", "rollout_log_probs")
"""Columns of played episodes."""
SCORED = ("score", "token_level_scores", "token_level_rewards")
"""Columns of their scores."""


@dataclass
class StepState:
    """State of a step: each stage takes it, and returns it with more columns or unchanged."""

    step: int
    metrics: MetricStore
    batch: AnyBatch = field(default_factory=lambda: Batch({}))
    groups: list[Group] = field(default_factory=list)
    """Played groups that the batch consists of."""
    left_out: list[AnyBatch] = field(default_factory=list)
    """Rows without a verdict."""

    def add(self, columns: AnyBatch) -> StepState:
        """Add columns of the same rows, or replace them."""
        self.batch = self.batch.updated(columns)
        return self

    @property
    def rows_left_out(self) -> AnyBatch | None:
        """Rows without a verdict as one batch; None without any."""
        return concat_batches(self.left_out) if self.left_out else None


StageFn = Callable[[StepState], StepState | Awaitable[StepState]]


@dataclass(frozen=True)
class Stage:
    """Stage of a training step.

    Attributes:
        when: True if the algorithm needs the stage; otherwise it is not run.
        role: role of the run that computes it.
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
    role: str = "work"


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


async def run_stages(stages: Sequence[Stage], state: StepState) -> StepState:
    """Run the active stages in order, timing each.

    Raises:
        ConfigError: a stage returned something else than the state.
    """
    for stage in (stage for stage in stages if stage.when):
        with activity.doing(stage.name), state.metrics.timer(stage.name):
            result = stage.run(state)
            result = await result if inspect.isawaitable(result) else result
        if not isinstance(result, StepState):
            raise ConfigError(
                f"stage '{stage.name}' returned {type(result).__name__}",
                why="a stage takes the StepState of the step and returns it; its batch is state.batch",
                fix="return state.add(columns), or return state",
            )
        state = result
    return state


TOKEN_BYTES = {"response_ids": 8, "response_mask": 8} | dict.fromkeys(
    (
        *("rollout_log_probs", "old_log_probs", "ref_log_probs", "sum_pi_squared", "values", "process_rewards"),
        "rollout_is_weights",
        *("token_level_scores", "token_level_rewards", "advantages", "returns"),
    ),
    4,
)
"""Bytes per response token of each column that has one value per token."""


def data_flow(config: RLConfig, stages: Sequence[Stage]) -> dict[str, Any]:
    """Return what a step of a run computes where, for ``run.json`` and diagrams.

    ``sequences`` and ``tokens`` of a step (at most), ``staleness`` of their weights in steps (at most), ``pools`` with their processes and roles, the active ``stages`` with the columns
    that each needs and adds, and ``bytes`` of the columns (at most).
    """
    sequences = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    tokens, active = sequences * config.data.max_response_length, [stage for stage in stages if stage.when]
    columns = {name for stage in active for name in stage.adds}
    return {
        "sequences": sequences,
        "tokens": tokens,
        "staleness": config.trainer.async_training.max_staleness,
        "pools": [
            {"name": pool.name, "processes": pool.world, "roles": list(pool.roles)} for pool in RunSpec(config).pools
        ],
        "stages": [
            {"name": stage.name, "role": stage.role, "needs": list(stage.needs), "adds": list(stage.adds)}
            for stage in active
        ],
        "bytes": {name: tokens * size for name, size in TOKEN_BYTES.items() if name in columns},
    }
