"""The life cycle shared by all trainers: run directory, trackers, checkpoints, signals, schedule of side activities."""

from __future__ import annotations

import contextlib
import logging
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hone.cluster.failures import is_out_of_memory, out_of_memory
from hone.cluster.watchdog import Hang, Watchdog, end_run
from hone.config import to_yaml
from hone.config.run import RunConfig
from hone.config.trees import AnyConfig
from hone.errors import HoneError
from hone.insight import activity
from hone.insight.run_directory import RunDirectory
from hone.insight.trackers import build_trackers
from hone.trainers.run_checkpoints import RunCheckpoints

log = logging.getLogger("hone")


class RunSession:
    """One run from start to finish.

    Usage::

        session = RunSession(config)
        with session.running(total_steps):
            while step < total_steps and not session.stop_requested:
                ...
                session.log(step, metrics)
                if session.save_due(step) and (where := session.begin_save(step)):
                    write = engine.stage(where, "actor")
                    session.finish_save(step, state, write)
            session.completed(step, memory)

    Args:
        config: the resolved configuration.
        on_hang: what to do when nothing moves any more; see :class:`hone.cluster.watchdog.Watchdog`.

    Attributes:
        rewards: what scores responses, with a hash of its code, for run.json; set before the run starts.
    """

    def __init__(self, config: AnyConfig, on_hang: Callable[[Hang], bool] = end_run) -> None:
        self.config = config
        self.trainer: RunConfig = config.trainer
        self.directory = RunDirectory(Path(self.trainer.default_local_dir))
        self._watchdog = self._watch(on_hang)
        self.checkpoints = RunCheckpoints(config, self.directory)
        self.resumed_from = self.checkpoints.resumed_from
        self.total_steps = 0
        self.rewards: dict[str, str] = {}
        self._signal: int | None = None
        self._logged_step = self.resumed_from.step if self.resumed_from else 0
        self._outcome = ("failed", "the loop ended without saying why", 0)
        self._memory: dict[str, dict[str, float]] = {}

    def _watch(self, on_hang: Callable[[Hang], bool]) -> Watchdog | None:
        """Publish what this process does, and have it watched from now on."""
        folder = self.directory.path / activity.FOLDER
        activity.clear(folder)
        activity.begin(folder, "driver")
        if not self.trainer.watchdog_seconds:
            return None
        watchdog = Watchdog(self.directory.path, self.trainer.watchdog_seconds, on_hang)
        weakref.finalize(self, watchdog.close)
        return watchdog

    # running ---------------------------------------------------------------------------------------------------------

    def _start(self, total_steps: int) -> None:
        """Write the configuration, cut back what a killed run wrote after its last checkpoint, and begin tracking."""
        self.total_steps = total_steps
        config_yaml = to_yaml(self.config)
        self.checkpoints.set_aside_later()
        last_step = self.resumed_from.step if self.resumed_from else None
        self.directory.start(seed=self.trainer.seed, config_yaml=config_yaml, last_step=last_step, rewards=self.rewards)
        self.directory.rewind(-1 if last_step is None else last_step)
        self.trackers = build_trackers(
            self.trainer.logger,
            run_dir=self.directory,
            project=self.trainer.project_name,
            experiment=self.trainer.experiment_name,
            config_yaml=config_yaml,
            total_steps=total_steps,
        )
        self._previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        if self.resumed_from:
            log.info("resuming from %s (step %d of %d)", self.resumed_from, self.resumed_from.step, total_steps)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number
        log.warning(
            "%s: finishing this step, saving, and stopping (again to stop at once)", signal.Signals(number).name
        )

    @property
    def stop_requested(self) -> bool:
        """Whether SIGINT or SIGTERM has arrived."""
        return self._signal is not None

    def due(self, frequency: int, step: int) -> bool:
        """Whether an activity of this frequency (every k steps; -1 only at the end; 0 never) is due after ``step``."""
        last = step == self.total_steps
        return frequency != 0 and (last or (frequency > 0 and step % frequency == 0))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one line of metrics.jsonl and tell the trackers."""
        self._logged_step = step
        self.checkpoints.saw(step, metrics)
        if seconds := self.checkpoints.take_seconds():
            metrics = {**metrics, "timing_s/save_checkpoint": seconds}
        self.trackers.log(step, metrics)

    def begin_save(self, step: int) -> str | None:
        """Where checkpoint ``step`` is to be written, None when it exists; waits for the save before."""
        return self.checkpoints.begin(step)

    def finish_save(self, step: int, state: dict[str, Any], write: Callable[[], object]) -> None:
        """Let checkpoint ``step`` appear as soon as ``write()`` has filled its directory; training goes on meanwhile."""
        self.checkpoints.publish(step, state, write)

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``: by trainer.save_freq, or because the run was told to stop."""
        return self.due(self.trainer.save_freq, step) or self.last_save_due

    @property
    def last_save_due(self) -> bool:
        """Whether the loop, told to stop, must leave a checkpoint of the step it came to."""
        return self.stop_requested and self.trainer.save_freq != 0

    def completed(self, step: int, memory: dict[str, dict[str, float]]) -> None:
        """Note how far the run came and why it ends; called once at the end of the loop.

        Args:
            step: the last.
            memory: what each process has held, see :class:`hone.training.memory.MemoryUse`.
        """
        self._memory = memory
        if self._signal is None:
            self._outcome = ("finished", f"all {self.total_steps} steps done", step)
        else:
            name = signal.Signals(self._signal).name
            self._outcome = ("interrupted", f"{name} after step {step} of {self.total_steps}; run again to go on", step)

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal that stopped the run."""
        return 0 if self._signal is None else 128 + self._signal

    @contextlib.contextmanager
    def running(self, total_steps: int) -> Iterator[None]:
        """Start the run; on leaving, whatever happened, close the trackers and record how it ended."""
        self._start(total_steps)
        try:
            yield
            self.checkpoints.wait()
        except BaseException as error:
            self._outcome = ("failed", f"{type(error).__name__}: {error}", self._logged_step)
            if isinstance(error, Exception):  # told to stop at once, it does not wait
                self.checkpoints.settle()
            if is_out_of_memory(error) and not isinstance(error, HoneError):
                raise out_of_memory(error, self.config, activity.stage_of(error)) from error
            raise
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._finish()
            activity.end()
            if self._watchdog is not None:
                self._watchdog.close()

    def _finish(self) -> None:
        status, reason, step = self._outcome
        try:
            self.trackers.finish(status)
            self.directory.update_status(status, exit_reason=reason, last_step=step, memory=self._memory)
        except HoneError as error:
            if status != "failed":
                raise
            log.warning("the end of the run could not be recorded: %s", error.what)  # what made it fail is raised


def session_steps(trainer: RunConfig, steps_per_epoch: int) -> int:
    """Steps of the run: total_training_steps, or total_epochs over the data."""
    by_epochs = trainer.total_epochs * steps_per_epoch
    return by_epochs if trainer.total_training_steps is None else trainer.total_training_steps
