"""Attempts of a run: it is built again from its last checkpoint when it loses a worker, as often as it may."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from hone.cluster.failures import WorkerLost
from hone.cluster.supervisor import ConfigT, Supervisor, resuming_config
from hone.cluster.torchrun.ranks import follows
from hone.trainers.notices import notices_of
from hone.trainers.session import AlreadyComplete, lock_run

log = logging.getLogger("hone")


def supervised(config: ConfigT, attempt: Callable[[ConfigT, Supervisor], int]) -> int:
    """Run a program to its end, and return its exit code.

    Args:
        attempt: builds the program and runs it; called again after a loss, with a configuration that resumes.

    Raises:
        WorkerLost: a worker was lost more often than trainer.max_restarts.
    """
    if follows(config):
        from hone.trainers.launched_session import followed

        return followed(lambda supervisor: attempt(config, supervisor))
    with lock_run(config.trainer):  # kept between the attempts
        restarts = config.trainer.max_restarts if config.trainer.runtime == "ray" else 0
        supervisor = Supervisor(Path(config.trainer.default_local_dir), restarts)
        with notices_of(config):
            try:
                while True:
                    try:
                        return attempt(config, supervisor)
                    except AlreadyComplete as complete:
                        log.info("%s", complete)
                        return 0
                    except WorkerLost as lost:
                        supervisor.restart(lost)
                        config = resuming_config(config)
            finally:
                supervisor.close()
