"""The life cycle shared by all trainers: run directory, trackers, checkpoints, signals, schedule of side activities."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import yaml

from hone.cluster.watchdog import Watchdog
from hone.config import to_yaml
from hone.config.run import RunConfig
from hone.config.trees import AnyConfig
from hone.errors import CheckpointError, ConfigError, HoneError
from hone.insight import activity
from hone.insight.redaction import redact_tree
from hone.insight.run_directory import RunDirectory
from hone.insight.trackers import build_trackers
from hone.training.checkpoint import Checkpoint, CheckpointStore

log = logging.getLogger("hone")

ORIGIN_KEYS = (
    *(
        "actor_rollout_ref.model.",
        "model.",
        "ref.model_path",
        "critic.model.path",
        "critic.enable",
        "algorithm.adv_estimator",
    ),
    *("data.train_files", "data.train_max_samples", "data.train_batch_size", "data.shuffle", "trainer.seed"),
)
"""What a checkpoint's state was made from (beginnings of keys)."""
FREE_KEYS = (
    *("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger"),
    *("trainer.resume_", "trainer.save_freq", "trainer.max_ckpt_to_keep", "trainer.total_", "trainer.num_threads"),
    *(
        "trainer.watchdog_seconds",
        "trainer.test_freq",
        "trainer.val_before_train",
        "trainer.rollout_dump_freq",
        "trainer.log_val_generations",
    ),
    *("preflight.", "actor_rollout_ref.model.enable_gradient_checkpointing", "model.enable_gradient_checkpointing"),
)
"""What may change from one part of a run to the next without a word (beginnings of keys)."""


class RunSession:
    """One run from start to finish.

    Usage::

        session = RunSession(config)
        with session.running(total_steps):
            while step < total_steps and not session.stop_requested:
                ...
                session.log(step, metrics)
                if session.save_due(step):
                    session.save(step, state, write)
            if session.last_save_due:
                session.save(step, state, write)
            session.completed(step)

    Args:
        config: the resolved configuration.
    """

    def __init__(self, config: AnyConfig) -> None:
        self.config = config
        self.trainer: RunConfig = config.trainer
        self.directory = RunDirectory(Path(self.trainer.default_local_dir))
        self._watchdog = self._watch()
        self.store = CheckpointStore(self.directory.checkpoints, self.trainer.max_ckpt_to_keep)
        self.total_steps = 0
        self.resumed_from: Checkpoint | None = self._find_checkpoint()
        self._signal: int | None = None
        self._logged_step = self.resumed_from.step if self.resumed_from else 0
        self._outcome = ("failed", "the loop ended without saying why", 0)
        self._saved_step = self.resumed_from.step if self.resumed_from else 0

    def _watch(self) -> Watchdog | None:
        """Publish what this process does, and have it watched from now on."""
        folder = self.directory.path / activity.FOLDER
        activity.clear(folder)
        activity.begin(folder, "driver")
        if not self.trainer.watchdog_seconds:
            return None
        watchdog = Watchdog(self.directory.path, self.trainer.watchdog_seconds)
        weakref.finalize(self, watchdog.close)
        return watchdog

    # resuming --------------------------------------------------------------------------------------------------------

    def _find_checkpoint(self) -> Checkpoint | None:
        mode, wanted = self.trainer.resume_mode, self.trainer.resume_from_path
        if mode == "resume_path":
            if not wanted:
                raise ConfigError(
                    "resume_mode=resume_path without a path",
                    where="trainer.resume_from_path",
                    fix="trainer.resume_from_path=<run>/checkpoints/step_<N>",
                )
            return self._checked(Checkpoint.open(Path(wanted)), strict=False)
        latest = self.store.latest()
        if mode == "disable" and latest is not None:
            raise CheckpointError(
                f"'{self.directory.path}' holds checkpoints up to step {latest.step}, and trainer.resume_mode=disable",
                why="starting over would mix two runs in one directory",
                fix="trainer.experiment_name=<another name>, or delete the directory, or trainer.resume_mode=auto",
                code="R55",
            )
        return self._checked(latest, strict=True) if latest else None

    def _checked(self, checkpoint: Checkpoint, *, strict: bool) -> Checkpoint:
        """Compare this run's configuration with the checkpoint's: what the checkpoint was made from may not change
        unnoticed. ``strict`` refuses, otherwise it is said and the run goes on.
        """
        changes = [c for c in changed_keys(checkpoint.config, redacted(self.config)) if not c.startswith(FREE_KEYS)]
        origins = [change for change in changes if change.startswith(ORIGIN_KEYS)]
        if origins and strict:
            raise CheckpointError(
                f"'{checkpoint.path}' was made with another {', '.join(origins)}",
                why="the run would go on as a mixture of two, and its curve would mean nothing",
                fix="undo the change; or trainer.experiment_name=<another name> for a new run; or go on in spite of it with "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint.path}",
                code="R55",
            )
        if changes:
            log.warning("resuming with a changed configuration: %s", "; ".join(changes))
        return checkpoint

    # running ---------------------------------------------------------------------------------------------------------

    def _start(self, total_steps: int) -> None:
        """Write the configuration, cut back what a killed run wrote after its last checkpoint, and begin tracking."""
        self.total_steps = total_steps
        config_yaml = to_yaml(self.config)
        abandoned = self.store.set_aside_after(self.resumed_from.step) if self.resumed_from else []
        if abandoned:
            log.warning("checkpoints of later steps are set aside as abandoned_step_<N>: %s", abandoned)
        last_step = self.resumed_from.step if self.resumed_from else None
        self.directory.start(seed=self.trainer.seed, config_yaml=config_yaml, last_step=last_step)
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
            log.info("resuming from %s (step %d of %d)", self.resumed_from.path, self.resumed_from.step, total_steps)

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
        self.trackers.log(step, metrics)

    def save(self, step: int, state: dict[str, Any], write: Callable[[Path], None]) -> None:
        """Write checkpoint ``step``, unless it exists."""
        if step != self._saved_step:
            with activity.doing("checkpoint"):
                self.store.save(step, state, redacted(self.config), write)
            self._saved_step = step

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``: by trainer.save_freq, or because the run was told to stop."""
        return self.due(self.trainer.save_freq, step) or self.last_save_due

    @property
    def last_save_due(self) -> bool:
        """Whether the loop, told to stop, must leave a checkpoint of the step it came to."""
        return self.stop_requested and self.trainer.save_freq != 0

    def completed(self, step: int) -> None:
        """Note how far the run came and why it ends; called once at the end of the loop."""
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
        except BaseException as error:
            self._outcome = ("failed", f"{type(error).__name__}: {error}", self._logged_step)
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
            self.directory.update_status(status, exit_reason=reason, last_step=step)
        except HoneError as error:
            if status != "failed":
                raise
            log.warning("the end of the run could not be recorded: %s", error.what)  # what made it fail is raised


def prepare_torch(trainer: RunConfig) -> torch.device:
    """Set torch's threads and return the device asked for.

    Raises:
        ConfigError: trainer.device=cuda and there is no CUDA GPU.
    """
    torch.set_num_threads(trainer.num_threads or len(os.sched_getaffinity(0)))
    if trainer.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda, but torch sees no CUDA GPU", fix="trainer.device=auto", code="R02")
    use_cuda = trainer.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if use_cuda else "cpu")


def session_steps(trainer: RunConfig, steps_per_epoch: int) -> int:
    """Steps of the run: total_training_steps, or total_epochs over the data."""
    return trainer.total_training_steps or trainer.total_epochs * steps_per_epoch


def redacted(config: AnyConfig) -> dict[str, Any]:
    """The configuration as a tree of plain values, credentials hidden."""
    return redact_tree(yaml.safe_load(to_yaml(config)))


def changed_keys(old: Any, new: Any, name: str = "") -> list[str]:
    """``key: old -> new`` for every leaf that differs between two trees of plain values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        parts = (changed_keys(old.get(key), new.get(key), f"{name}.{key}" if name else key) for key in keys)
        return [change for part in parts for change in part]
    return [] if old == new else [f"{name}: {old} -> {new}"]
