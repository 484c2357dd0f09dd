"""The checkpoints of one run as its trainer sees them: which to go on from, when one is due to appear, which is best."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import yaml

from hone.config import to_yaml
from hone.config.run import RunConfig
from hone.config.trees import AnyConfig
from hone.errors import CheckpointError, ConfigError, HoneError, did_you_mean
from hone.insight import activity
from hone.insight.redaction import redact_tree
from hone.insight.run_directory import RunDirectory
from hone.training.checkpoints.checkpoint import Checkpoint, find_checkpoint
from hone.training.checkpoints.store import CheckpointStore

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
    *(
        "data.train_files",
        "data.train_max_samples",
        "data.train_batch_size",
        "data.shuffle",
        "data.sampler.",
        "trainer.seed",
    ),
)
"""What a checkpoint's state was made from (beginnings of keys)."""
FREE_KEYS = (
    *("trainer.default_local_dir", "trainer.project_name", "trainer.experiment_name", "trainer.logger"),
    *("trainer.resume_", "trainer.save_freq", "trainer.max_ckpt_to_keep", "trainer.total_", "trainer.num_threads"),
    *("trainer.best_ckpt_", "trainer.checkpoint_dir", "trainer.async_save"),
    *("trainer.watchdog_seconds", "trainer.max_restarts", "trainer.test_freq", "trainer.val_before_train"),
    *("trainer.rollout_dump_freq", "trainer.log_val_generations", "preflight."),
    *(
        f"{block}.{key}"
        for block in ("model", "actor_rollout_ref.model")
        for key in ("enable_gradient_checkpointing", "enable_activation_offload", "tiled_mlp")
    ),
)
"""What may change from one part of a run to the next without a word (beginnings of keys)."""


class RunCheckpoints:
    """The checkpoints of one run.

    Attributes:
        resumed_from: the checkpoint that the run goes on from, or None.

    Args:
        config: the resolved configuration.
        directory: of the run.

    Raises:
        ConfigError: trainer.resume_mode=resume_path without a path.
        CheckpointError: what the run should go on from is damaged or of another run, or the storage cannot be reached.
    """

    def __init__(self, config: AnyConfig, directory: RunDirectory) -> None:
        self._config = config
        self._trainer: RunConfig = config.trainer
        self.store = CheckpointStore(
            self._trainer.checkpoint_dir or directory.checkpoints,
            self._trainer.max_ckpt_to_keep,
            best=self._trainer.best_ckpt_mode,
            background=self._trainer.async_save,
        )
        self.resumed_from: Checkpoint | None = self._find()
        self._saved_step = self.resumed_from.step if self.resumed_from else 0
        self._seen: tuple[int, dict[str, float]] = (-1, {})
        self._began = self._held_up = 0.0

    # resuming --------------------------------------------------------------------------------------------------------

    def _find(self) -> Checkpoint | None:
        mode, wanted = self._trainer.resume_mode, self._trainer.resume_from_path
        if mode == "resume_path":
            if not wanted:
                raise ConfigError(
                    "resume_mode=resume_path without a path",
                    where="trainer.resume_from_path",
                    fix="trainer.resume_from_path=<run>/checkpoints/step_<N>",
                )
            return self._checked(find_checkpoint(wanted), strict=False)
        latest = self._latest()
        if mode == "disable" and latest is not None:
            raise CheckpointError(
                f"'{self.store.root}' holds checkpoints up to step {latest.step}, and trainer.resume_mode=disable",
                why="starting over would mix two runs in one directory",
                fix="trainer.experiment_name=<another name>, or delete the directory, or trainer.resume_mode=auto",
                code="R55",
            )
        return self._checked(latest, strict=True) if latest else None

    def _latest(self) -> Checkpoint | None:
        try:
            return self.store.latest()
        except OSError as error:
            raise CheckpointError(
                f"'{self.store.root}' cannot be read: {error}",
                why="the run can neither go on from its checkpoints nor save new ones",
                where="trainer.checkpoint_dir",
                fix="check the address, the credentials and the network; or trainer.checkpoint_dir=null",
            ) from error

    def _checked(self, checkpoint: Checkpoint, *, strict: bool) -> Checkpoint:
        """Compare this run's configuration with the checkpoint's: what the checkpoint was made from may not change
        unnoticed. ``strict`` refuses, otherwise it is said and the run goes on.
        """
        changes = [c for c in changed_keys(checkpoint.config, redacted(self._config)) if not c.startswith(FREE_KEYS)]
        origins = [change for change in changes if change.startswith(ORIGIN_KEYS)]
        if origins and strict:
            raise CheckpointError(
                f"'{checkpoint}' was made with another {', '.join(origins)}",
                why="the run would go on as a mixture of two, and its curve would mean nothing",
                fix="undo the change; or trainer.experiment_name=<another name> for a new run; or go on in spite of it with "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={checkpoint}",
                code="R55",
            )
        if changes:
            log.warning("resuming with a changed configuration: %s", "; ".join(changes))
        return checkpoint

    def set_aside_later(self) -> None:
        """Take checkpoints after the one resumed from out of the count."""
        abandoned = self.store.set_aside_after(self.resumed_from.step) if self.resumed_from else []
        if abandoned:
            log.warning("checkpoints of later steps are set aside as abandoned_step_<N>: %s", abandoned)

    # saving ----------------------------------------------------------------------------------------------------------

    def saw(self, step: int, metrics: dict[str, float]) -> None:
        """Take note of a step's metrics; raises the error of a save that has failed meanwhile."""
        self.store.check()
        self._seen = (step, metrics)

    def begin(self, step: int) -> str | None:
        """Where checkpoint ``step`` is to be written, None when it exists; waits for the save before."""
        if step == self._saved_step:
            return None
        self._began = time.perf_counter()
        with activity.doing("checkpoint"):
            return str(self.store.begin(step))

    def publish(self, step: int, state: dict[str, Any], write: Callable[[], object]) -> None:
        """Let checkpoint ``step`` appear as soon as ``write()`` has filled its directory."""
        metric, value = self._trainer.best_ckpt_metric, self._value(step)
        with activity.doing("checkpoint"):
            self.store.publish(step, state, redacted(self._config), write, metric=metric, value=value)
        self._saved_step = step
        self._held_up += time.perf_counter() - self._began

    def take_seconds(self) -> float:
        """Seconds that saving has held the run up since the last call."""
        seconds, self._held_up = self._held_up, 0.0
        return seconds

    def wait(self) -> None:
        """Wait until nothing is being written; raises the error of a save that failed."""
        with activity.doing("checkpoint"):
            self.store.wait()

    def settle(self) -> None:
        """Wait likewise at the end of a run that failed for another reason, which is what will be raised."""
        try:
            self.wait()
        except (HoneError, OSError) as error:
            log.warning("a checkpoint could not be saved either: %s", error)

    def _value(self, step: int) -> float | None:
        """The metric that chooses the best checkpoint, as measured at ``step``."""
        name = self._trainer.best_ckpt_metric
        if name is None:
            return None
        seen, metrics = self._seen
        value = metrics.get(name) if seen == step else None
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
    """The configuration as a tree of plain values, credentials hidden."""
    return redact_tree(yaml.safe_load(to_yaml(config)))


def changed_keys(old: Any, new: Any, name: str = "") -> list[str]:
    """``key: old -> new`` for every leaf that differs between two trees of plain values."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = [*old, *(key for key in new if key not in old)]
        parts = (changed_keys(old.get(key), new.get(key), f"{name}.{key}" if name else key) for key in keys)
        return [change for part in parts for change in part]
    return [] if old == new else [f"{name}: {old} -> {new}"]
