"""Checkpoints of a run: choice of the one to resume from, saving, and the best one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from hone.config.environment import environment_keys, written_tree
from hone.config.run import RunConfig, TrainerConfig
from hone.config.trees import AnyConfig
from hone.errors import CheckpointError, ConfigError, HoneError, did_you_mean
from hone.insight import activity
from hone.insight.redaction import is_secret_name, redact_tree
from hone.insight.run_directory import RunDirectory
from hone.training.checkpoints.checkpoint import Checkpoint, find_checkpoint
from hone.training.checkpoints.store import CheckpointStore

log = logging.getLogger("hone")

ENVIRONMENT = "environment"
"""Key of a checkpoint's state: digests of values from environment variables, which its configuration does not have."""
ORIGIN_KEYS = (
    *(
        "actor_rollout_ref.model.",
        "model.",
        "ref.model_path",
        "critic.model.path",
        "critic.enable",
        "algorithm.adv_estimator",
    ),
    *(
        "data.train_files",
        "data.train_max_samples",
        "data.train_batch_size",
        "data.shuffle",
        "data.sampler.",
        "data.custom_cls.",
        "trainer.seed",
    ),
)
"""Prefixes of keys that determine a checkpoint's state."""
FREE_KEYS = (
    *("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger"),
    *("trainer.resume_", "trainer.save_freq", "trainer.max_ckpt_to_keep", "trainer.total_", "trainer.num_threads"),
    *(
        "trainer.best_ckpt_",
        "trainer.checkpoint_dir",
        "trainer.async_save",
        "trainer.timeline",
        "trainer.profile_steps",
    ),
    "trainer.async_training.validation_share",
    *("trainer.watchdog_seconds", "trainer.max_restarts", "trainer.test_freq", "trainer.val_before_train"),
    *("trainer.rollout_dump_", "trainer.save_steps_for_replay", "trainer.log_val_generations", "preflight."),
    *(
        f"{block}.{key}"
        for block in ("model", "actor_rollout_ref.model")
        for key in (
            "enable_gradient_checkpointing",
            "gradient_checkpointing_keeps",
            "enable_activation_offload",
            "tiled_mlp",
        )
    ),
)
"""Prefixes of keys that may change on resume without a warning."""


def steps_before_replays(trainer: RunConfig) -> frozenset[int]:
    """Return the steps whose checkpoints ``trainer.save_steps_for_replay`` needs; a first step begins with the model itself."""
    steps = trainer.save_steps_for_replay if isinstance(trainer, TrainerConfig) else ()
    return frozenset(step - 1 for step in steps if step > 1)


class RunCheckpoints:
    """Checkpoints of one run.

    Attributes:
        resumed_from: checkpoint from which the run resumes, or None.

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
        if changes:
            log.warning("resuming with a changed configuration: %s", "; ".join(changes))
        return checkpoint

    def _changes(self, checkpoint: Checkpoint) -> list[str]:
        """Return ``key: old -> new`` of the keys that differ from a checkpoint's, also in the values of variables."""
        old, new = checkpoint.config, redacted(self._config)
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


def changed_keys(old: Any, new: Any, name: str = "") -> list[str]:
    """Return ``key: old -> new`` for every leaf that differs between two trees of plain values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        changes = (changed_keys(old.get(key), new.get(key), f"{name}.{key}" if name else key) for key in keys)
        return [change for subtree in changes for change in subtree]
    return [] if old == new else [f"{name}: {old} -> {new}"]
