"""The tracker protocol, the registry, and the composite that a trainer talks to.

``metrics.jsonl`` is the record of the run: it is always written, first, and if it cannot be, the run stops. The other
trackers show the same numbers elsewhere; one that fails never ends the run.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import yaml

from hone.errors import ConfigError, HoneError
from hone.insight.redaction import redact_tree
from hone.insight.run_directory import RunDirectory
from hone.registry import Registry

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the metrics of one run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of a step; steps rise."""
        ...

    def finish(self, status: str) -> None:
        """Flush and close; ``status`` is ``finished``, ``interrupted`` or ``failed``."""
        ...


@dataclass(frozen=True)
class RunInfo:
    """What a tracker is told about the run when it is made.

    Attributes:
        run_dir: the run directory.
        project: groups runs.
        experiment: names the run.
        config_yaml: the resolved config.
        total_steps: steps that the run will take.
    """

    run_dir: RunDirectory
    project: str
    experiment: str
    config_yaml: str
    total_steps: int

    def config(self) -> dict[str, Any]:
        """The config as a tree, credentials hidden."""
        return redact_tree(yaml.safe_load(self.config_yaml) or {})


TRACKERS: Registry[Callable[[RunInfo], Tracker]] = Registry("tracker", key="trainer.logger")
"""Tracker factories by the name that trainer.logger lists."""


def build_trackers(
    names: Sequence[str],
    *,
    run_dir: RunDirectory | Path,
    project: str,
    experiment: str,
    config_yaml: str,
    total_steps: int,
) -> CompositeTracker:
    """Make the trackers called ``names``, and always that of ``metrics.jsonl``. On resume, rewind the run directory first: trackers go on from its last step.

    Raises:
        ConfigError: no such tracker, its package is not installed, or it cannot start.
    """
    directory = run_dir if isinstance(run_dir, RunDirectory) else RunDirectory(run_dir)
    info = RunInfo(directory, project, experiment, config_yaml, total_steps)
    factories = {name: TRACKERS.get(name) for name in dict.fromkeys(names)}  # unknown names fail before anything opens
    record = TRACKERS.get("jsonl")(info)
    others = {name: _start(name, factory, info) for name, factory in factories.items() if name != "jsonl"}
    return CompositeTracker(record, others)


def _start(name: str, factory: Callable[[RunInfo], Tracker], info: RunInfo) -> Tracker:
    try:
        return factory(info)
    except HoneError:
        raise
    except Exception as error:  # whatever a third party raises: no network, no login, no server
        raise ConfigError(
            f"tracker '{name}' cannot start ({type(error).__name__}: {error})",
            where="trainer.logger",
            fix=f"mend that, or leave '{name}' out of trainer.logger (wandb: WANDB_MODE=offline needs no network)",
        ) from error


class CompositeTracker:
    """Logs to all trackers: first to the record of the run, whose errors go up, then to the others.

    Another tracker that fails, say for want of a network, never ends the run: its errors are counted, the first of each tracker is logged with its traceback, and the count is shown at the end.

    Args:
        record: writes ``metrics.jsonl``.
        others: by name.

    Attributes:
        errors: failed calls by tracker name.
    """

    def __init__(self, record: Tracker, others: Mapping[str, Tracker]) -> None:
        self._record, self._trackers = record, dict(others)
        self.errors: Counter[str] = Counter()
        self._finished = False

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step everywhere."""
        self._record.log(step, metrics)
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.log, step, metrics)

    def finish(self, status: str) -> None:
        """Close all trackers and report how many calls failed. A second call does nothing."""
        if self._finished:
            return
        self._finished = True
        for name, tracker in self._trackers.items():
            self._guarded(name, tracker.finish, status)
        self._record.finish(status)
        if self.errors:
            counts = ", ".join(f"{name}: {count}" for name, count in sorted(self.errors.items()))
            logger.warning("tracker errors: %s (metrics.jsonl is complete)", counts)

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception:  # whatever a third party raises; counted and logged
            self.errors[name] += 1
            if self.errors[name] == 1:
                logger.exception("tracker '%s' failed; training goes on, further errors are only counted", name)


def require(module: str, *, tracker: str) -> ModuleType:
    """Import the optional package behind a tracker.

    Raises:
        ConfigError: it is not installed; the fix names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"tracker '{tracker}' needs a package that is not installed ({error})",
            where="trainer.logger",
            fix=f"pip install 'hone-rl[{tracker}]', or leave '{tracker}' out of trainer.logger",
        ) from error
