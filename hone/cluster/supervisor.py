"""Supervision: a run survives the loss of workers by replacing them and resuming from its last checkpoint.

The driver continues, and so do the workers that were not lost: they close their roles and build them again, without new
imports. Steps since the last checkpoint are computed again, with the same draws; the numbers of the run are those of an
undisturbed one.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from hone.cluster.context import RoleSpec
from hone.cluster.failures import WorkerLost
from hone.cluster.runtime import Runtime, build_runtime
from hone.cluster.watchdog import Hang
from hone.config.trees import AnyConfig
from hone.insight import activity
from hone.insight.activity import is_here
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import RUN
from hone.training.checkpoints.store import CheckpointStore

log = logging.getLogger("hone")

ConfigT = TypeVar("ConfigT", bound=AnyConfig)

START_LIMIT = 1800.0
"""Seconds that starting processes and loading models may take without progress."""


@runtime_checkable
class Renewable(Protocol):
    """Runtime whose workers can be replaced."""

    def renew(self, resume: str | None) -> None:
        """Replace lost workers, and build all roles again from a checkpoint (None: from the start)."""
        ...

    def kill(self, name: str) -> bool:
        """Kill a worker at once; return false if there is none of that name."""
        ...


class Supervisor:
    """Holder of a run's runtime, with the number of its restarts.

    Args:
        run: the run directory.
        max_restarts: trainer.max_restarts.
    """

    def __init__(self, run: Path, max_restarts: int) -> None:
        self._run, self.max_restarts, self.restarts = run, max_restarts, 0
        self._runtime: Runtime | None = None

    def runtime(self, config: AnyConfig, roles: Sequence[RoleSpec], *, total_steps: int, resume: str | None) -> Runtime:
        """Return the runtime with all roles built from a checkpoint: a new one, or the repaired one."""
        with activity.doing("starting", limit=START_LIMIT):
            if isinstance(self._runtime, Renewable):
                self._runtime.renew(resume)
            else:
                self._runtime = build_runtime(config, roles, total_steps=total_steps, resume=resume)
        assert self._runtime is not None
        gc.freeze()  # existing objects are permanent: collections skip them in every step
        return self._runtime

    def restart(self, lost: WorkerLost) -> None:
        """Count and log one restart.

        Raises:
            WorkerLost: the number of restarts is used up.
        """
        if self.restarts == self.max_restarts:
            raise lost
        self.restarts += 1
        log.warning("restart %d of %d: %s", self.restarts, self.max_restarts, lost.what)
        if (self._run / RUN).exists():
            RunDirectory(self._run).add_restart(lost.what)

    def on_hang(self, hang: Hang) -> bool:
        """Kill the culprits of a hang, if the run may restart; their loss then triggers a restart."""
        if self.restarts == self.max_restarts or not isinstance(self._runtime, Renewable):
            return False
        ended = [self._end(culprit.name, culprit.pid, culprit.host) for culprit in hang.culprits]
        return bool(ended) and all(ended)

    def close(self) -> None:
        """End all workers."""
        if self._runtime is not None:
            self._runtime.close()
            self._runtime = None
            gc.unfreeze()

    def _end(self, name: str, pid: int, host: str) -> bool:
        assert isinstance(self._runtime, Renewable)
        if self._runtime.kill(name):
            return True
        if pid == os.getpid() or not is_here(host):
            return False
        os.kill(pid, signal.SIGKILL)  # a child process of a worker
        return True


def resuming_config(config: ConfigT) -> ConfigT:
    """Return the configuration of another attempt: it resumes from the run's newest checkpoint, if there is one."""
    location = config.trainer.checkpoint_dir or Path(config.trainer.default_local_dir) / "checkpoints"
    if config.trainer.resume_mode == "auto" or CheckpointStore(location, None).latest() is None:
        return config
    resuming = copy.copy(config)
    resuming.trainer = dataclasses.replace(config.trainer, resume_mode="auto")  # type: ignore[assignment]
    return resuming
