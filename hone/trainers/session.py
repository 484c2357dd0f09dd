"""Life cycle of all trainers: run directory, trackers, checkpoints, signals and schedules."""

from __future__ import annotations

import contextlib
import logging
import signal
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hone.cluster.failures import is_out_of_memory, out_of_memory
from hone.cluster.watchdog import Hang, Watchdog, end_run
from hone.config import to_yaml
from hone.config.environment import environment_variables, flatten, written_tree
from hone.config.fields import AFTER_EACH_EPOCH
from hone.config.run import RunConfig, TrainerConfig
from hone.config.trees import AnyConfig
from hone.config.trust import remember
from hone.errors import EXIT_STOPPED, HoneError
from hone.insight import activity, timeline
from hone.insight.detectors.watch import TIMED, Watch
from hone.insight.redaction import hide_variables
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import CONFIG
from hone.insight.run_lock import RunLock
from hone.insight.stop_requests import StopRequest, StopWatch, check_may_start, clear_stop, kill_children, read_stop
from hone.insight.trackers import build_trackers
from hone.trainers.callbacks import run_callbacks
from hone.trainers.notices import run_notices
from hone.trainers.run_checkpoints import RunCheckpoints, steps_before_replays
from hone.training.checkpoints.storage import Storage

log = logging.getLogger("hone")

DETECTORS_STATE = "detectors"
"""Key of a checkpoint's state: what the detectors have seen."""


class RunSession:
    """Session of one run, from start to end.

    Usage::

        session = RunSession(config)
        with session.running(total_steps, steps_per_epoch):
            while step < total_steps and not session.stop_requested:
                ...
                session.log(step, metrics)
                if session.save_due(step) and (where := session.begin_save(step)):
                    write = engine.stage(where, "actor")
                    session.finish_save(step, state, write)
            session.completed(step, memory)

    Args:
        on_hang: reaction to a hang; see :class:`hone.cluster.watchdog.Watchdog`.

    Attributes:
        rewards: scorers with a hash of their code, for run.json; set before the run starts.
        agent_contract: version and hashes of what the policy expects as an agent, for run.json; set before the run starts.

    Raises:
        HoneError: somebody stopped the run (`hone stop`), another process trains in the directory, or the checkpoint to resume from
            is damaged.
    """

    def __init__(self, config: AnyConfig, on_hang: Callable[[Hang], bool] = end_run) -> None:
        self.config = config
        self.trainer: RunConfig = config.trainer
        hide_variables(environment_variables(config))
        check_may_start(Path(self.trainer.default_local_dir))
        self._lock = lock_run(self.trainer)
        weakref.finalize(self, self._lock.release)
        self.directory = RunDirectory(Path(self.trainer.default_local_dir))
        self.notices = run_notices(config)
        self._watchdog = self._watch(on_hang)
        self.checkpoints = RunCheckpoints(config, self.directory)
        self.resumed_from = self.checkpoints.resumed_from
        if self.resumed_from is None:
            timeline.clear(self.directory.path)
        if self.trainer.timeline:
            activity.record_timeline()
        self.total_steps = 0
        self.rewards: dict[str, str] = {}
        self.agent_contract: dict[str, str] = {}
        settings = dict(flatten(written_tree(config)))
        self.detectors = Watch(self.directory, settings, ignore=config.insight.ignore, stop_on=config.insight.stop_on)
        if self.resumed_from is not None and DETECTORS_STATE in self.resumed_from.state:
            with self.resumed_from.loading_state() as state:
                self.detectors.restore(state[DETECTORS_STATE])
        self._signal: int | None = None
        self._stop: StopRequest | None = None
        self._callbacks = run_callbacks()
        self._stopped_by_callback, self._exit_code = False, 0
        self._logged_step = self.resumed_from.step if self.resumed_from else 0
        self._outcome = ("failed", "the loop ended without a recorded reason", 0)
        self._memory: dict[str, dict[str, float]] = {}

    def _watch(self, on_hang: Callable[[Hang], bool]) -> Watchdog | None:
        """Publish this process's activity, and start the watchdog."""
        folder = self.directory.path / activity.FOLDER
        activity.clear(folder)
        activity.begin(folder, "driver")
        if not self.trainer.watchdog_seconds:
            return None
        watchdog = Watchdog(self.directory.path, self.trainer.watchdog_seconds, partial(self._hangs, on_hang))
        weakref.finalize(self, watchdog.close)
        return watchdog

    def _hangs(self, on_hang: Callable[[Hang], bool], hang: Hang) -> bool:
        """React to a hang, and send a notice if it ends the run."""
        continues = on_hang(hang)
        if not continues:
            self.notices.hangs(hang.reason)
        return continues

    # running ---------------------------------------------------------------------------------------------------------

    def _start(self, total_steps: int) -> None:
        """Write the configuration, remove records after the last checkpoint of a killed run, and start the trackers."""
        self.total_steps = total_steps
        config_yaml = to_yaml(self.config)
        self.checkpoints.set_aside_later()
        last_step = self.resumed_from.step if self.resumed_from else None
        self.directory.start(
            seed=self.trainer.seed,
            config_yaml=config_yaml,
            last_step=last_step,
            rewards=self.rewards,
            agent_contract=self.agent_contract,
        )
        remember(self.directory.path / CONFIG, self.config)
        self.directory.rewind(-1 if last_step is None else last_step)
        self.trackers = build_trackers(
            self.trainer.logger,
            run_dir=self.directory,
            project=self.trainer.project_name,
            experiment=self.trainer.experiment_name,
            config_yaml=config_yaml,
            total_steps=total_steps,
            samples=self.trainer.log_rollout_samples if isinstance(self.trainer, TrainerConfig) else 0,
        )
        self._previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        if self.resumed_from:
            log.info("resuming from %s (step %d of %d)", self.resumed_from, self.resumed_from.step, total_steps)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None or (self._stop is not None and self._stop.at_once):
            raise KeyboardInterrupt
        self._signal = number
        log.warning(
            "%s: finishing this step, saving, and stopping (repeat to stop immediately)", signal.Signals(number).name
        )

    def _stop_at_once(self, request: StopRequest) -> None:
        """Note a request to stop at once, so that SIGTERM ends the run without another step."""
        self._stop = request

    def _killed(self, request: StopRequest) -> None:
        """Record the end of a run whose main thread does not end."""
        reason = f"stopped at once by {request}; its processes were killed"
        self.directory.update_status("interrupted", exit_reason=reason, last_step=self._logged_step)

    @property
    def stop_requested(self) -> bool:
        """True once SIGINT, SIGTERM or a request of `hone stop` has arrived, a callback has returned True, or an alert ends the run."""
        if self._stop is None and (request := read_stop(self.directory.path)) is not None:
            self._stop = request
            log.warning("stopped by %s: saving and stopping", request)
        stopped = self._stopped_by_callback or self.detectors.stopped_by is not None
        return self._signal is not None or self._stop is not None or stopped

    def due(self, frequency: int | str, step: int) -> bool:
        """Return whether an activity is due after ``step``: every k steps, -1 only at the end, 0 never, or after each epoch."""
        every = self.steps_per_epoch if frequency == AFTER_EACH_EPOCH else int(frequency)
        return every != 0 and (step == self.total_steps or (every > 0 and step % every == 0))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Let the detectors read the metrics, write a line of metrics.jsonl, and log to the trackers."""
        self._logged_step = step
        alerts = self.detectors.observe(step, metrics)
        of_machine = sum(alert.detector in TIMED for alert in alerts)
        counts = {"insight/alerts": len(alerts) - of_machine, "insight/alerts/machine": of_machine}
        metrics = {**metrics, **{name: float(count) for name, count in counts.items() if count}}
        self.checkpoints.note_metrics(step, metrics)
        if seconds := self.checkpoints.take_seconds():
            metrics = {**metrics, "timing_s/save_checkpoint": seconds}
        self.trackers.log(step, metrics)
        records = [alert.record() for alert in alerts]
        self.trackers.alerts(step, records)
        self.notices.alerts(step, records)
        if self._callbacks.step(step, metrics):
            self._stopped_by_callback = True

    def log_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of a validation that ended after its step was logged, as a second line of that step."""
        self.checkpoints.note_validation(step, metrics)
        self.detectors.add_validation(metrics)
        self.trackers.log(step, metrics)
        if self._callbacks.step(step, metrics):
            self._stopped_by_callback = True

    def shared(self, make: Callable[[], Any]) -> Any:
        """Return what ``make`` returns; in a launched run the first rank makes it for all."""
        return make()

    @property
    def wants_samples(self) -> bool:
        """True if a function of the user receives the rollouts."""
        return self._callbacks.on_sample is not None

    def samples(self, records: Sequence[dict[str, Any]]) -> None:
        """Give the rollouts of a step, as records of the archive, to the function of the user."""
        if self._callbacks.samples(records):
            self._stopped_by_callback = True

    def begin_save(self, step: int) -> str | None:
        """Return where to write checkpoint ``step``, or None if it exists; wait for the previous save."""
        return self.checkpoints.begin(step)

    def finish_save(
        self, step: int, state: dict[str, Any], write: Callable[[], object], *, validating: bool = False
    ) -> None:
        """Publish checkpoint ``step`` once ``write()`` has filled its directory, in the background.

        Args:
            step: the same as for :meth:`begin_save`.
            state: of the trainer.
            write: writes the weights.
            validating: True if the validation of this step is under way; :meth:`log_validation` then rates the checkpoint.
        """
        state = {**state, DETECTORS_STATE: self.detectors.state()}
        self.checkpoints.publish(step, state, write, validating=validating)

    def save_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``: by trainer.save_freq, before a step for replays, or because of a stop request."""
        return (
            self.due(self.trainer.save_freq, step) or self.last_save_due or step in steps_before_replays(self.trainer)
        )

    @property
    def last_save_due(self) -> bool:
        """True if the loop must save its last step after a stop request."""
        return self.stop_requested and self.trainer.save_freq != 0

    def completed(self, step: int, memory: dict[str, dict[str, float]]) -> None:
        """Record the last step and the reason of the end; called once at the end of the loop.

        Args:
            step: last step.
            memory: memory of each process, see :class:`hone.models.kernels.cpu.memory.MemoryUse`.
        """
        self._memory = memory
        alert, left = self.detectors.stopped_by, step < self.total_steps
        if alert is not None and left and self._signal is None:
            resume = "run the command again to resume, or leave the detector out of insight.stop_on"
            reason = (
                f"{alert.detector} ended it after step {step} of {self.total_steps} (insight.stop_on): {alert.what}"
            )
            self._outcome = ("interrupted", f"{reason}; {alert.fix}; {resume}", step)
            self._exit_code = EXIT_STOPPED
            log.error("%s.\n  Why it matters: %s\n  Fix: %s; then %s", reason, alert.why, alert.fix, resume)
        elif self._stop is not None and self._signal is None:
            self._stopped(step, self._stop)
        elif self._stopped_by_callback and left:
            self._outcome = ("finished", f"a callback ended it after step {step} of {self.total_steps}", step)
        elif self._signal is None:
            self._outcome = ("finished", f"all {self.total_steps} steps done", step)
        else:
            name = signal.Signals(self._signal).name
            self._outcome = (
                "interrupted",
                f"{name} after step {step} of {self.total_steps}; run the command again to resume",
                step,
            )

    def _stopped(self, step: int, request: StopRequest) -> None:
        """Record an end by a request. One to stop at once stays, so that nothing starts the run again."""
        again = "run the command again to resume"
        if request.at_once:
            again = f"hone stop {self.directory.path} --clear, then {again}"
        else:
            clear_stop(self.directory.path)
        self._outcome = ("finished", f"all {self.total_steps} steps done", step)
        if step < self.total_steps:
            reason = f"stopped after step {step} of {self.total_steps} by {request}"
            self._outcome, self._exit_code = ("interrupted", f"{reason}; {again}", step), EXIT_STOPPED

    @property
    def exit_code(self) -> int:
        """Exit code: 0, 4 if an alert of insight.stop_on or `hone stop` ended the run, or 128 + the signal that stopped it."""
        return self._exit_code if self._signal is None else 128 + self._signal

    @contextlib.contextmanager
    def running(self, total_steps: int, steps_per_epoch: int) -> Iterator[None]:
        """Start the run; on exit, also after an error, close the trackers and record the run's end."""
        self.steps_per_epoch = steps_per_epoch
        self._start(total_steps)
        watch = StopWatch(self.directory.path, self._stop_at_once, self._killed)
        try:
            yield
            self.checkpoints.wait()
        except BaseException as error:
            self._outcome = ("failed", f"{type(error).__name__}: {error}", self._logged_step)
            if self._stop is not None and self._stop.at_once:
                self._outcome = ("interrupted", f"stopped at once by {self._stop}", self._logged_step)
            if isinstance(error, Exception):  # an immediate stop does not wait
                self.checkpoints.settle()
            if is_out_of_memory(error) and not isinstance(error, HoneError):
                raise out_of_memory(error, self.config, activity.stage_of(error)) from error
            raise
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)
            self._finish()
            watch.close()
            if self._stop is not None and self._stop.at_once:
                kill_children()
            activity.end()
            if self._watchdog is not None:
                self._watchdog.close()
            self._lock.release()

    def _finish(self) -> None:
        status, reason, step = self._outcome
        try:
            self.trackers.finish(status)
            self.directory.update_status(status, exit_reason=reason, last_step=step, memory=self._memory)
        except HoneError as error:
            if status != "failed":
                raise
            log.warning("the end of the run could not be recorded: %s", error.what)  # the error of the run is raised


def lock_run(trainer: RunConfig) -> RunLock:
    """Lock the directories that a run writes: its own, and a local trainer.checkpoint_dir.

    Raises:
        HoneError: another process holds one of them.
    """
    directories = [Path(trainer.default_local_dir)]
    if trainer.checkpoint_dir is not None and (checkpoints := Storage(trainer.checkpoint_dir)).is_local:
        directories.append(checkpoints.local_path)
    return RunLock(*directories)


def session_steps(trainer: RunConfig, steps_per_epoch: int) -> int:
    """Return the steps of the run: total_training_steps, else total_epochs over the data."""
    by_epochs = trainer.total_epochs * steps_per_epoch
    return by_epochs if trainer.total_training_steps is None else trainer.total_training_steps
