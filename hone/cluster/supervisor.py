"""Lets a run outlive the loss of workers: lost processes are replaced, and the run goes on from its last checkpoint.

The driver lives on, and so do the workers that were not lost: they let go of their roles and take them up again, without paying for
imports. What was computed since the last checkpoint is computed again, with the same draws; so the numbers of the run are those of
an undisturbed one.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from hone.cluster.context import RoleSpec
from hone.cluster.failures import WorkerLost
from hone.cluster.runtime import Runtime, build_runtime
from hone.cluster.watchdog import Hang
from hone.config.tree import RLConfig
from hone.insight import activity
from hone.insight.activity import is_here
from hone.insight.run_directory import RunDirectory
from hone.insight.run_files import RUN
from hone.training.checkpoints.store import CheckpointStore

log = logging.getLogger("hone")

START_LIMIT = 1800.0
"""Seconds that starting processes and loading models may take without a sign of life."""


@runtime_checkable
class Renewable(Protocol):
    """A runtime whose workers can be replaced."""

    def renew(self, resume: str | None) -> None:
        """Replace what is lost, and make all roles anew from a checkpoint (None: from the start)."""
        ...

    def kill(self, name: str) -> bool:
        """End a worker at once; false when there is none of that name."""
        ...


class Supervisor:
    """Holds the runtime of a run, and counts how often its workers were restarted.

    Args:
        run: the run directory.
        max_restarts: trainer.max_restarts.
    """

    def __init__(self, run: Path, max_restarts: int) -> None:
        self._run, self.max_restarts, self.restarts = run, max_restarts, 0
        self._runtime: Runtime | None = None

    def runtime(self, config: RLConfig, roles: Sequence[RoleSpec], *, total_steps: int, resume: str | None) -> Runtime:
        """The runtime with all roles made from a checkpoint: a new one, or the one that lost workers, mended."""
        with activity.doing("starting", limit=START_LIMIT):
            if isinstance(self._runtime, Renewable):
                self._runtime.renew(resume)
            else:
                self._runtime = build_runtime(config, roles, total_steps=total_steps, resume=resume)
        assert self._runtime is not None
        gc.freeze()  # what is there now stays: collections need not walk through it in every step
        return self._runtime

    def restart(self, lost: WorkerLost) -> None:
        """Count one restart, and say so.

        Raises:
            WorkerLost: there have been as many as allowed.
        """
        if self.restarts == self.max_restarts:
            raise lost
        self.restarts += 1
        log.warning("restart %d of %d: %s", self.restarts, self.max_restarts, lost.what)
        if (self._run / RUN).exists():
            RunDirectory(self._run).add_restart(lost.what)

    def on_hang(self, hang: Hang) -> bool:
        """End the workers that hold up the run, if it may restart them; their loss then does the rest."""
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
        os.kill(pid, signal.SIGKILL)  # a process that a worker had started
        return True


def going_on(config: RLConfig) -> RLConfig:
    """The configuration with which a run is attempted again: from its own newest checkpoint, once it has saved one."""
    location = config.trainer.checkpoint_dir or Path(config.trainer.default_local_dir) / "checkpoints"
    if config.trainer.resume_mode == "auto" or CheckpointStore(location, None).latest() is None:
        return config
    return dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, resume_mode="auto"))
