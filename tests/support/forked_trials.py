"""Trials of `hone twins` and `hone sweep` as forks of a command that has imported the heavy libraries already."""

from __future__ import annotations

import os
import sys

from hone.cli import trials
from hone.cli.trials import LOG, Trial
from hone.errors import HoneError


def fork_trials() -> None:
    """Let trials be forks, in a process that has started no threads; a ``prepare`` of :class:`support.launch.Command`."""
    trials.run_trial = _forked


def _forked(trial: Trial) -> None:
    from hone.cli.main import main

    trial.directory.mkdir(parents=True, exist_ok=True)
    log = trial.directory / LOG
    process = os.fork()
    if process == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["hone", *trial.words]
        code = 1
        try:
            main(list(trial.words))
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    _, status = os.waitpid(process, 0)
    if os.waitstatus_to_exitcode(status):
        raise HoneError(f"the trial failed:\n{log.read_text()}", where=str(trial.directory))
