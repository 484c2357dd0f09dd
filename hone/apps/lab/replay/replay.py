"""Replay of a stored step: the same program runs it again, from any of its stages, and the results are compared."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hone.apps.lab.compare import read_whole_run
from hone.apps.lab.divergence import Bisection, RunTrace, bisect_runs, read_trace
from hone.apps.lab.replay.stored import StoredStep, checkpoint_before, checkpoints, load_step, require_stored_inputs
from hone.config.trust import run_config
from hone.errors import HoneError
from hone.trainers.estimates import KEPT
from hone.trainers.rl import RLTrainer, train
from hone.trainers.session import Callbacks, calling
from hone.trainers.stages import SAMPLED, Stage, StepState
from hone.training.checkpoints.checkpoint import complete_steps

log = logging.getLogger("hone")
CORRECTED = (KEPT, "rollout_is_weights")
"""Columns of the stage ``rollout_corr``, which a run without correction does not add."""
ENGINE_STAGES = frozenset({"sleep", "update_weights", "fork"})
"""Stages that need engines or the groups that they played; a replay of stored samples leaves them out."""
OF_THE_FOLDER = ("coverage/", "curriculum/", "episode/tool_seconds", "tool/seconds")
"""Prefixes of metrics that depend on earlier steps of the run directory, or on wall times."""
OF_DRAWING = ("training/epoch", "training/staleness", "training/no_verdict_groups", "rollout/canary_gap", "data/")
"""Prefixes of metrics of drawing and playing prompts and of publishing weights, which a replay of stored samples does not do."""


@dataclass(frozen=True)
class Replay:
    """Result of a replay."""

    folder: Path  # run directory of the replay
    stages: Sequence[str]  # stages that ran
    bisection: Bisection  # comparison with the stored step


def replay(run: Path, step: int, first: str | None = None, overrides: Sequence[str] = ()) -> Replay:
    """Run a stored step of a run again, and compare it with what the run stored.

    Stages before ``first`` have their stored results; None runs all. ``overrides`` change the configuration.
    """
    stored = load_step(run, step)
    checkpoint = checkpoint_before(stored)
    saved = step in complete_steps(checkpoints(stored))
    folder = run / "replays" / f"step_{step}"
    resume = (
        ["trainer.resume_mode=disable"]
        if checkpoint is None
        else ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={checkpoint}"]
    )
    config = run_config(
        run,
        [
            f"trainer.default_local_dir={_unused(folder)}",
            "trainer.checkpoint_dir=null",
            *resume,
            f"trainer.save_freq={int(saved)}",
            "trainer.test_freq=0",
            "trainer.val_before_train=false",
            "trainer.logger=[]",
            "trainer.max_restarts=0",
            f"trainer.save_steps_for_replay=[{step}]",
            *overrides,
        ],
    )
    if first is not None and config.trainer.runtime != "local":
        raise HoneError(
            f"a replay from stage {first!r} runs in one process, but trainer.runtime={config.trainer.runtime}",
            why="the stored columns are in this process; both runtimes compute the same numbers",
            fix="trainer.runtime=local, or a replay of the whole step",
            where="--from",
            code="E-replay",
        )
    if first is not None:
        require_stored_inputs(config, weights=True, code="E-replay", fix="a replay of the whole step, without --from")
    ran: list[str] = []
    program = type("ReplayTrainer", (ReplayTrainer,), {"stored": stored, "first": first, "ran": ran})
    with calling(Callbacks(lambda number, metrics: True)):
        train(config, program)
    result = Path(config.trainer.default_local_dir)
    left_out = OF_THE_FOLDER + (OF_DRAWING if first else ())
    traces = (_step_trace(path, step, left_out) for path in (run, result))
    return Replay(result, ran, bisect_runs(*_shared(*traces)))


class ReplayTrainer(RLTrainer):
    """Trainer of one stored step."""

    stored: StoredStep
    first: str | None  # first stage to run; None runs all
    ran: list[str]  # names of the stages that ran

    def stages(self) -> list[Stage]:
        """Return the stages from the first one on; the stored step has the results of those before."""
        stages = super().stages()
        if self.first is not None:
            stages = self._from(stages, self.first)
        self.ran[:] = [stage.name for stage in stages if stage.when]
        return stages

    def _from(self, stages: list[Stage], first: str) -> list[Stage]:
        names = [stage.name for stage in stages if stage.when and stage.name not in ENGINE_STAGES]
        if first not in names:
            raise HoneError(
                f"the run has no stage {first!r} to begin with",
                fix=f"one of {', '.join(names[1:])}",
                where="--from",
                code="E-replay",
            )
        at = [stage.name for stage in stages].index(first)
        later = [stage for stage in stages[at:] if stage.name not in ENGINE_STAGES]
        computed = {name for stage in later if stage.when for name in stage.adds}
        computed |= set(CORRECTED) if any(stage.name == "rollout_corr" for stage in later) else set()
        kept = [name for name in self.stored.batch.names() if name not in computed - set(SAMPLED)]

        def load(state: StepState) -> StepState:
            state.batch = self.stored.batch.select(*kept)
            return state

        return [Stage("stored", load, adds=tuple(kept)), *later]


def _unused(folder: Path) -> Path:
    """Return a directory that does not exist yet: the name itself, or with a number."""
    number, choice = 2, folder
    while choice.exists():
        choice, number = folder.with_name(f"{folder.name}_{number}"), number + 1
    return choice


def _step_trace(path: Path, step: int, left_out: tuple[str, ...]) -> RunTrace:
    trace = read_trace(read_whole_run(path, path.name))
    metrics = {name: value for name, value in trace.metrics.get(step, {}).items() if not name.startswith(left_out)}
    return replace(
        trace,
        config={},
        circumstances={},
        draws={},
        samples={number: read for number, read in trace.samples.items() if number == step},
        micro_batches={},
        metrics={step: metrics},
        weights={number: read for number, read in trace.weights.items() if number == step},
    )


def _shared(one: RunTrace, other: RunTrace) -> tuple[RunTrace, RunTrace]:
    """Return both traces with the metrics that both have: a replay does not validate."""
    (step,) = one.metrics
    names = one.metrics[step].keys() & other.metrics[step].keys()
    return (
        replace(one, metrics={step: {name: one.metrics[step][name] for name in sorted(names)}}),
        replace(other, metrics={step: {name: other.metrics[step][name] for name in sorted(names)}}),
    )
