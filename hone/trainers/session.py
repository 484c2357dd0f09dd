"""Life cycle of all trainers: run directory, trackers, checkpoints, signals and schedules; and functions of the user that a run calls."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import math
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from hone.cluster.failures import is_out_of_memory, out_of_memory
from hone.cluster.watchdog import Hang, Watchdog, end_run
from hone.config import to_yaml
from hone.config.environment import environment_keys, environment_variables, flatten, written_tree
from hone.config.fields import AFTER_EACH_EPOCH
from hone.config.run import RunConfig, TrainerConfig
from hone.config.trees import AnyConfig
from hone.config.trust import remember
from hone.errors import EXIT_STOPPED, CheckpointError, ConfigError, HoneError, did_you_mean
from hone.insight import activity, timeline
from hone.insight.detectors.watch import TIMED, Watch
from hone.insight.redaction import hide_variables, is_secret_name, redact_tree
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import CONFIG, read_run
from hone.insight.run_lock import RunLock
from hone.insight.stop_requests import StopRequest, StopWatch, check_may_start, clear_stop, kill_children, read_stop
from hone.insight.trackers import build_trackers
from hone.progress import counting
from hone.startup import interrupt
from hone.together import HURRY
from hone.trainers.notices import run_notices
from hone.training.checkpoints.checkpoint import Checkpoint, find_checkpoint
from hone.training.checkpoints.storage import Storage
from hone.training.checkpoints.store import CheckpointStore

log = logging.getLogger("hone")

DETECTORS_STATE = "detectors"
"""Key of a checkpoint's state: what the detectors have seen."""

_AGAIN = "run the command again to resume"


class AlreadyComplete(Exception):
    """The checkpoint that a run resumes from is that of its last step."""


class _Stopped(Exception):
    """A stop request cancels this work."""


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
        flow: data flow of a step, for run.json and the viewer's diagram; set before the run starts, where the run has stages.

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
        self.flow: dict[str, Any] = {}
        settings = dict(flatten(written_tree(config)))
        self.detectors = Watch(self.directory, settings, ignore=config.insight.ignore, stop_on=config.insight.stop_on)
        if self.resumed_from is not None and DETECTORS_STATE in self.resumed_from.state:
            with self.resumed_from.loading_state() as state:
                self.detectors.restore(state[DETECTORS_STATE])
        self._signal: int | None = None
        self._repeated = self._cancels = False  # a second signal has arrived; the first one cancels what is under way
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

    def require_steps(self, total_steps: int) -> None:
        """Warn of keys that changed since the checkpoint, and end a run that is complete.

        Raises:
            AlreadyComplete: no step is left.
        """
        resumed, changes = self.resumed_from, "; ".join(self.checkpoints.changes)
        if resumed is None or resumed.step < total_steps or resumed.state.get("validating"):
            if changes:
                log.warning("resuming with a changed configuration: %s", changes)
            return
        if changes:
            log.warning("changed keys without effect: %s", changes)
        reason = f"already complete at step {resumed.step}"
        status = read_run(self.directory.path).get("status")
        if status in ("running", "failed", "interrupted"):  # it ended after its last checkpoint
            self.directory.update_status("finished", exit_reason=reason, last_step=resumed.step)
        self._release()
        named = self.directory.path.name != self.trainer.experiment_name  # by trainer.default_local_dir
        key = "trainer.default_local_dir" if named else "trainer.experiment_name"
        raise AlreadyComplete(f"{reason}; nothing was trained; another {key} starts a new run")

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
            flow=self.flow,
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
            first_step=last_step or 0,
            samples=self.trainer.log_rollout_samples if isinstance(self.trainer, TrainerConfig) else 0,
        )
        self._previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGINT, signal.SIGTERM)}
        if self.resumed_from:
            log.info("resuming from %s (step %d of %d)", self.resumed_from, self.resumed_from.step, total_steps)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None or (self._stop is not None and self._stop.at_once):
            self._repeated = True
            interrupt()
        self._signal = number
        doing = "finishing this step, saving, and stopping"
        if self._cancels:
            HURRY.set()
            doing = "ending the validation, and stopping"
        log.warning("%s: %s (repeat to stop immediately)", signal.Signals(number).name, doing)

    def _stop_at_once(self, request: StopRequest) -> None:
        """Note a request to stop at once, so that SIGTERM ends the run without another step."""
        self._stop = request

    def _killed(self, request: StopRequest) -> None:
        """Record the end of a run whose main thread does not end."""
        reason = f"stopped at once by {request}; its processes were killed"
        self.directory.update_status("interrupted", exit_reason=reason, last_step=self._logged_step)

    @contextlib.contextmanager
    def cancelling(self, what: str, total: int) -> Iterator[None]:
        """Show the progress of work that a stop request cancels, while the block runs; the block then ends without an error."""
        self._cancels, bar = True, self.trackers.progress(what, total)

        def advance(count: int) -> None:
            bar.advance(count)
            if self.stop_requested:
                raise _Stopped

        try:
            with contextlib.suppress(_Stopped), counting(advance):
                yield
        finally:
            self._cancels = False
            HURRY.clear()
            bar.close()

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
            resume = f"{_AGAIN}, or leave the detector out of insight.stop_on"
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
        elif self._signal is None or not left:
            self._outcome = ("finished", f"all {self.total_steps} steps done", step)
        else:
            name = signal.Signals(self._signal).name
            self._outcome = (
                "interrupted",
                f"{name} after step {step} of {self.total_steps}; {_AGAIN}",
                step,
            )

    def _stopped(self, step: int, request: StopRequest) -> None:
        """Record an end by a request. One to stop at once stays, so that nothing starts the run again."""
        again = _AGAIN
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
            elif self._repeated:
                reason = f"stopped at once after step {self._logged_step} of {self.total_steps}; {_AGAIN}"
                self._outcome = ("interrupted", reason, self._logged_step)
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
            self._release()

    def _release(self) -> None:
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


ENVIRONMENT = "environment"
"""Key of a checkpoint's state: digests of values from environment variables, which its configuration does not have."""
ORIGIN_KEYS = (
    "actor_rollout_ref.model.", "model.", "ref.model_path", "critic.model.path", "critic.enable", "algorithm.adv_estimator",
    "data.train_files", "data.train_max_samples", "data.train_batch_size", "data.shuffle", "data.sampler.", "data.custom_cls.", "data.row_fn",
    "trainer.seed",
)  # fmt: skip
"""Prefixes of keys that determine a checkpoint's state."""
_MEMORY_KEYS = (
    "enable_gradient_checkpointing",
    "gradient_checkpointing_keeps",
    "enable_activation_offload",
    "tiled_mlp",
)
FREE_KEYS = (
    "trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.resume_",
    "trainer.save_freq", "trainer.max_ckpt_to_keep", "trainer.total_", "trainer.num_threads", "trainer.best_ckpt_",
    "trainer.checkpoint_dir", "trainer.async_save", "trainer.timeline", "trainer.profile_steps",
    "trainer.async_training.validation_share", "trainer.watchdog_seconds", "trainer.max_restarts", "trainer.test_freq",
    "trainer.val_before_train", "trainer.rollout_dump_", "trainer.save_steps_for_replay", "trainer.log_val_generations", "preflight.",
    *(f"{block}.{key}" for block in ("model", "actor_rollout_ref.model") for key in _MEMORY_KEYS),
)  # fmt: skip
"""Prefixes of keys that may change on resume without a warning."""


def steps_before_replays(trainer: RunConfig) -> frozenset[int]:
    """Return the steps whose checkpoints ``trainer.save_steps_for_replay`` needs; a first step begins with the model itself."""
    steps = trainer.save_steps_for_replay if isinstance(trainer, TrainerConfig) else ()
    return frozenset(step - 1 for step in steps if step > 1)


class RunCheckpoints:
    """Checkpoints of one run.

    Attributes:
        resumed_from: checkpoint from which the run resumes, or None.
        changes: ``key: old -> new`` of this run's configuration since that checkpoint.

    Raises:
        ConfigError: trainer.resume_mode=resume_path without a path.
        CheckpointError: the checkpoint is damaged or of another run, or the storage is unreachable.
    """

    def __init__(self, config: AnyConfig, directory: RunDirectory) -> None:
        self._config = config
        self._trainer: RunConfig = config.trainer
        self.store = CheckpointStore(
            self._trainer.checkpoint_dir or directory.checkpoints,
            self._trainer.max_ckpt_to_keep,
            best=self._trainer.best_ckpt_mode,
            background=self._trainer.async_save,
            always=steps_before_replays(self._trainer),
        )
        self.changes: list[str] = []
        self.resumed_from: Checkpoint | None = self._find()
        self._saved_step = self.resumed_from.step if self.resumed_from else 0
        self._last_metrics: tuple[int, dict[str, float]] = (-1, {})
        self._unrated: int | None = None  # step of a checkpoint whose validation is under way
        self._save_started = self._blocked_seconds = 0.0

    # resuming --------------------------------------------------------------------------------------------------------

    def _find(self) -> Checkpoint | None:
        mode, requested_path = self._trainer.resume_mode, self._trainer.resume_from_path
        if mode == "resume_path":
            if not requested_path:
                raise ConfigError(
                    "resume_mode=resume_path without a path",
                    where="trainer.resume_from_path",
                    fix="trainer.resume_from_path=<run>/checkpoints/step_<N>",
                )
            return self._checked(find_checkpoint(requested_path), strict=False)
        latest = self._latest()
        if mode == "disable" and latest is not None:
            raise CheckpointError(
                f"'{self.store.root}' has checkpoints up to step {latest.step}, but trainer.resume_mode=disable",
                why="a new run would mix with the old one in this directory",
                fix="set trainer.experiment_name=<another name>, or delete the directory, or set trainer.resume_mode=auto",
                code="R55",
            )
        return self._checked(latest, strict=True) if latest else None

    def _latest(self) -> Checkpoint | None:
        try:
            return self.store.latest()
        except OSError as error:
            raise CheckpointError(
                f"'{self.store.root}' cannot be read: {error}",
                why="the run can neither resume from its checkpoints nor save new ones",
                where="trainer.checkpoint_dir",
                fix="check the address, the credentials and the network; or set trainer.checkpoint_dir=null",
            ) from error

    def _checked(self, checkpoint: Checkpoint, *, strict: bool) -> Checkpoint:
        """Verify a checkpoint's files, and compare this run's configuration with that of the checkpoint.

        Changes of keys that determine its state raise an error with ``strict``; otherwise changes are only logged.
        """
        checkpoint.verify()
        changes = [change for change in self._changes(checkpoint) if not change.startswith(FREE_KEYS)]
        origins = [change for change in changes if change.startswith(ORIGIN_KEYS)]
        if origins and strict:
            raise CheckpointError(
                f"'{checkpoint}' was made with another configuration: {', '.join(origins)}",
                why="the run would be a mixture of two configurations, and its curves would be meaningless",
                fix="undo the change; or set trainer.experiment_name=<another name> for a new run; or resume anyway with "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint}",
                code="R55",
            )
        self.changes = changes
        return checkpoint

    def _changes(self, checkpoint: Checkpoint) -> list[str]:
        """Return ``key: old -> new`` of the keys that differ from a checkpoint's, also in the values of variables."""
        old = completed(checkpoint.config, dataclasses.asdict(type(self._config)()))
        new = redacted(self._config)
        values = redact_tree(dataclasses.asdict(self._config))
        before, now = checkpoint.state.get(ENVIRONMENT, {}), _digests(self._config)
        unequal = {
            change.partition(":")[0] for change in changed_keys(old, values)
        }  # old may have values for variables
        changes = [change for change in changed_keys(old, new) if change.partition(":")[0] in unequal]
        same = {key for key in before if before[key] == _digest(_value_at(dataclasses.asdict(self._config), key))}
        changes = [change for change in changes if change.partition(":")[0] not in same]
        others = sorted(key for key in before.keys() & now.keys() if before[key] != now[key])
        return [*changes, *(f"{key}: an environment variable has another value" for key in others)]

    def set_aside_later(self) -> None:
        """Set aside the checkpoints after the one resumed from."""
        abandoned = self.store.set_aside_after(self.resumed_from.step) if self.resumed_from else []
        if abandoned:
            log.warning("checkpoints of later steps are set aside as abandoned_step_<N>: %s", abandoned)

    # saving ----------------------------------------------------------------------------------------------------------

    def note_metrics(self, step: int, metrics: dict[str, float]) -> None:
        """Store a step's metrics; raise the error of a background save that has failed."""
        self.store.check()
        self._last_metrics = (step, metrics)

    def note_validation(self, step: int, metrics: dict[str, float]) -> None:
        """Add the metrics of a validation that ended after its step, and rate the checkpoint of that step if there is one."""
        self.note_metrics(step, {**self._metrics_of(step), **metrics})
        if self._unrated == step:
            self._unrated, value = None, self._value(step)
            if value is not None:
                self.store.rate(step, str(self._trainer.best_ckpt_metric), value)

    def begin(self, step: int) -> str | None:
        """Return where to write checkpoint ``step``, or None if it exists; wait for the previous save."""
        if step == self._saved_step:
            return None
        self._save_started = time.perf_counter()
        with activity.doing("checkpoint"):
            return str(self.store.begin(step))

    def publish(
        self, step: int, state: dict[str, Any], write: Callable[[], object], *, validating: bool = False
    ) -> None:
        """Publish checkpoint ``step`` once ``write()`` has filled its directory.

        With ``validating``, the metric that selects the best checkpoint may come later, by :meth:`note_validation`.
        """
        metric = self._trainer.best_ckpt_metric
        comes_later = validating and metric is not None and metric not in self._metrics_of(step)
        self._unrated, value = (step, None) if comes_later else (None, self._value(step))
        with activity.doing("checkpoint"):
            state = {**state, ENVIRONMENT: _digests(self._config)}
            self.store.publish(step, state, redacted(self._config), write, metric=metric, value=value)
        self._saved_step = step
        self._blocked_seconds += time.perf_counter() - self._save_started

    def take_seconds(self) -> float:
        """Return the seconds for which saving has blocked the run since the last call."""
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return seconds

    def wait(self) -> None:
        """Wait until all saves are finished; raise the error of a failed one."""
        with activity.doing("checkpoint"):
            self.store.wait()

    def settle(self) -> None:
        """Wait for saves at the end of a failed run; only log their errors, so that the run's error is raised."""
        try:
            self.wait()
        except (HoneError, OSError) as error:
            log.warning("a checkpoint could not be saved: %s", error)

    def _metrics_of(self, step: int) -> dict[str, float]:
        """Return the metrics of ``step``, empty if it is not the last one."""
        return self._last_metrics[1] if self._last_metrics[0] == step else {}

    def _value(self, step: int) -> float | None:
        """Return the value at ``step`` of the metric that selects the best checkpoint, or None."""
        name = self._trainer.best_ckpt_metric
        if name is None:
            return None
        metrics = self._metrics_of(step)
        value = metrics.get(name)
        if value is None or not math.isfinite(value):
            log.warning(
                "step %d has no %s, so its checkpoint cannot be the best one (trainer.best_ckpt_metric). %s",
                step,
                name,
                did_you_mean(name, metrics) if name not in metrics else f"It is {value}.",
            )
            return None
        return value


def redacted(config: AnyConfig) -> dict[str, Any]:
    """Return the configuration as it is written: plain values, interpolations for variables, redacted credentials."""
    return redact_tree(written_tree(config))


def _digests(config: AnyConfig) -> dict[str, str]:
    """Return a digest of each value from the environment that determines a checkpoint's state, such as the model's path."""
    keys = [key for key in environment_keys(config) if key.startswith(ORIGIN_KEYS) and not is_secret_name(key)]
    values = dataclasses.asdict(config)
    return {key: _digest(_value_at(values, key)) for key in sorted(keys)}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def completed(old: Any, defaults: Any) -> Any:
    """Return an older tree with the keys that its version of Hone did not have, at their defaults."""
    if not isinstance(old, dict) or not isinstance(defaults, dict):
        return old
    return defaults | {key: completed(value, defaults.get(key)) for key, value in old.items()}


def changed_keys(old: Any, new: Any, name: str = "") -> list[str]:
    """Return ``key: old -> new`` for every leaf that differs between two trees of plain values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        changes = (changed_keys(old.get(key), new.get(key), f"{name}.{key}" if name else key) for key in keys)
        return [change for subtree in changes for change in subtree]
    return [] if old == new else [f"{name}: {old} -> {new}"]


OnStep = Callable[[int, Mapping[str, float]], object]
"""Function of a step and its metrics; when it returns True, the run saves its state and ends after this step."""

OnSample = Callable[[dict[str, Any]], object]
"""Function of a scored rollout, a record of the archive; True ends the run like that of :data:`OnStep`."""


@dataclass(frozen=True)
class Callbacks:
    """Functions that a run calls.

    Attributes:
        on_step: function of each step, or None.
        on_sample: function of each scored rollout of training, or None.
    """

    on_step: OnStep | None = None
    on_sample: OnSample | None = None

    def step(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Call ``on_step``; return True if the run should end."""
        return self.on_step is not None and self.on_step(step, dict(metrics)) is True

    def samples(self, records: Sequence[dict[str, Any]]) -> bool:
        """Call ``on_sample`` for every record of a step; return True if the run should end."""
        assert self.on_sample is not None
        answers = [self.on_sample(record) for record in records]
        return any(answer is True for answer in answers)


_CALLBACKS: ContextVar[Callbacks] = ContextVar("callbacks", default=Callbacks())  # noqa: B039 - it is frozen


@contextmanager
def calling(callbacks: Callbacks) -> Iterator[None]:
    """Let runs that start in this context call the functions."""
    token = _CALLBACKS.set(callbacks)
    try:
        yield
    finally:
        _CALLBACKS.reset(token)


def run_callbacks() -> Callbacks:
    """Return the functions for runs that start here."""
    return _CALLBACKS.get()
