"""The life cycle shared by all trainers: run directory, trackers, checkpoints, signals, schedule of side activities."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hone.config import to_yaml
from hone.config.tree import RLConfig, RunConfig, SFTConfig
from hone.errors import CheckpointError, ConfigError
from hone.insight.run_directory import RunDirectory
from hone.insight.trackers import build_trackers
from hone.training.checkpoint import Checkpoint, CheckpointStore

log = logging.getLogger("hone")


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
            session.completed(step)

    Args:
        config: the resolved configuration.
    """

    def __init__(self, config: RLConfig | SFTConfig) -> None:
        self.config = config
        self.trainer: RunConfig = config.trainer
        self.directory = RunDirectory(Path(self.trainer.default_local_dir))
        self.store = CheckpointStore(self.directory.checkpoints, self.trainer.max_ckpt_to_keep)
        self.total_steps = 0
        self.resumed_from: Checkpoint | None = self._find_checkpoint()
        self._signal: int | None = None
        self._logged_step = self.resumed_from.step if self.resumed_from else 0
        self._outcome = ("failed", "the loop ended without saying why", 0)
        self._saved_step = self.resumed_from.step if self.resumed_from else 0

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
            return Checkpoint.open(Path(wanted))
        latest = self.store.latest()
        if mode == "disable" and latest is not None:
            raise CheckpointError(
                f"'{self.directory.path}' holds checkpoints up to step {latest.step}, and trainer.resume_mode=disable",
                why="starting over would mix two runs in one directory",
                fix="trainer.experiment_name=<another name>, or delete the directory, or trainer.resume_mode=auto",
                code="R55",
            )
        return latest

    # running ---------------------------------------------------------------------------------------------------------

    def _start(self, total_steps: int) -> None:
        """Write the configuration, cut back what a killed run wrote after its last checkpoint, and begin tracking."""
        self.total_steps = total_steps
        config_yaml = to_yaml(self.config)
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
            self.store.save(step, state, to_yaml(self.config), write)
            self._saved_step = step

    def save_due(self, step: int) -> bool:
        """Whether a checkpoint is due after ``step``: by trainer.save_freq, or because the run was told to stop."""
        return self.due(self.trainer.save_freq, step) or (self.stop_requested and self.trainer.save_freq != 0)

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
            status, reason, step = self._outcome
            self.trackers.finish(status)
            self.directory.update_status(status, exit_reason=reason, last_step=step)
            for number, handler in self._previous.items():
                signal.signal(number, handler)


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


def changed_keys(old: Any, new: Any, ignore: Iterable[str] = (), prefix: str = "") -> list[str]:
    """Dotted names of the leaves that differ between two configurations of one type, as ``name: old -> new``."""
    found: list[str] = []
    for field in dataclasses.fields(old):
        name, a, b = f"{prefix}{field.name}", getattr(old, field.name), getattr(new, field.name)
        if name in ignore or a == b:
            continue
        found += changed_keys(a, b, ignore, f"{name}.") if dataclasses.is_dataclass(a) else [f"{name}: {a} -> {b}"]
    return found
