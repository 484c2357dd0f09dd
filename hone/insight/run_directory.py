"""The directory that a run writes.

    <path>/
      config.yaml             the resolved config, credentials hidden
      run.json                versions, hardware, seed, git state, command, status, exit reason, times, last step
      metrics.jsonl           one object a step
      rollouts/step_<N>.jsonl       every sample of chosen steps: tokens, text, mask, scores
      rollouts/step_<N>.txt         some episodes of several turns, to be read
      validation/step_<N>.jsonl     validation samples
      checkpoints/step_<N>/         written by the trainer

Every file except ``metrics.jsonl`` is written beside and renamed into place. ``metrics.jsonl`` grows by whole lines,
each flushed; what a kill leaves of a last line is dropped when the run is opened again.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import yaml

from hone.insight import environment
from hone.insight.records import trajectory_record
from hone.insight.redaction import redact_command, redact_text, redact_tree
from hone.insight.run_files import (
    CONFIG,
    METRICS_FILE,
    RUN,
    disk_errors,
    encode_number,
    jsonable,
    read_metrics,
    read_rows,
    read_run,
    unwritable,
)
from hone.insight.traces import sampled_traces

__all__ = ["RunDirectory", "RunStatus", "read_metrics", "read_run", "trajectory_record"]

log = logging.getLogger("hone.insight")

_STEP_FILE = re.compile(r"step_(\d+)\.(?:jsonl|txt)")


class RunStatus(StrEnum):
    """What became of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    """Ended by a signal, resumable."""
    FAILED = "failed"


class RunDirectory:
    """Writes one run. Only the driver process holds one.

    >>> run = RunDirectory("runs/hone/demo")                            # doctest: +SKIP
    >>> run.start(seed=1, config_yaml=to_yaml(config))                  # doctest: +SKIP
    >>> run.log_metrics(1, {"actor/pg_loss": 0.1})                      # doctest: +SKIP
    >>> run.update_status("finished", exit_reason="all steps done")     # doctest: +SKIP

    Args:
        path: the directory; made if absent.

    Raises:
        HoneError: the directory cannot be made or written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.metrics_path = self.path / METRICS_FILE
        self.rollouts, self.validation = self.path / "rollouts", self.path / "validation"
        self.checkpoints = self.path / "checkpoints"
        self._metrics_file: IO[str] | None = None
        self._last_step: int | None = None
        with disk_errors(self.path):
            for folder in (self.path, self.rollouts, self.validation, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK):
            raise unwritable(self.path, "no permission to write")

    # metrics ---------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int | None:
        """Step of the last line of ``metrics.jsonl``, None when there is none."""
        self._metrics()
        return self._last_step

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step, one line, flushed. Numbers are read back exactly (see :func:`read_metrics`).

        Raises:
            ValueError: this step, or a later one, is there already: one line a step; :meth:`rewind` first on resume.
            HoneError: the disk is full.
        """
        last = self.last_step
        if last is not None and step <= last:
            raise ValueError(f"metrics of step {step} come after those of step {last}")
        line = json.dumps(
            {"step": step, **{name: encode_number(float(value)) for name, value in metrics.items()}}, allow_nan=False
        )
        file = self._metrics()
        with disk_errors(self.metrics_path):
            file.write(line + "\n")
            file.flush()
        self._last_step = step

    def rewind(self, step: int) -> int:
        """Forget everything after ``step``, for a run that resumes from that step's checkpoint.

        Drops later lines of ``metrics.jsonl`` and later rollout and validation files. Checkpoints are left alone. A run
        that begins anew in a used directory rewinds to -1: step 0 is the validation before training.

        Returns:
            How many metric lines were dropped.

        Raises:
            HoneError: a line other than the last is not JSON.
        """
        self.close()
        rows = list(read_rows(self.metrics_path)) if self.metrics_path.exists() else []
        kept = [line for number, line in rows if number <= step]
        self._write_atomically(self.metrics_path, "".join(line + "\n" for line in kept))
        for folder in (self.rollouts, self.validation):
            for file in folder.iterdir():
                match = _STEP_FILE.fullmatch(file.name)
                if match and int(match[1]) > step:
                    file.unlink()
        return len(rows) - len(kept)

    def _metrics(self) -> IO[str]:
        """``metrics.jsonl``, open at its end; half a last line is cut off when it is opened."""
        if self._metrics_file is None:
            with disk_errors(self.metrics_path):
                self._last_step = None
                if self.metrics_path.exists():
                    rows = list(read_rows(self.metrics_path))
                    os.truncate(self.metrics_path, sum(len(line.encode()) + 1 for _, line in rows))
                    self._last_step = rows[-1][0] if rows else None
                self._metrics_file = self.metrics_path.open("a", encoding="utf-8", newline="\n")
        return self._metrics_file

    # samples ---------------------------------------------------------------------------------------------------------

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the samples of a training step (see :func:`trajectory_record`), one object a line; and beside them some of its
        episodes of several turns as text.
        """
        records = list(records)
        traces = sampled_traces(records)
        if traces is not None:
            self._write_atomically(self.rollouts / f"step_{step}.txt", traces)
        return self.write_records(self.rollouts / f"step_{step}.jsonl", records)

    def write_validation(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write validation samples, one object a line."""
        return self.write_records(self.validation / f"step_{step}.jsonl", records)

    def write_records(self, path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write any records as JSON lines, atomically; returns ``path``."""
        lines = (json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        self._write_atomically(path, "".join(lines))
        return path

    # the run itself --------------------------------------------------------------------------------------------------

    def expect(self, plan: list[dict[str, Any]]) -> None:
        """Note in ``run.json`` what this process's run is predicted to hold; :meth:`start` keeps it."""
        self._write_run(self._run() | {"plan": plan, "pid": os.getpid()})

    def start(
        self,
        *,
        seed: int,
        config_yaml: str,
        command: list[str] | None = None,
        last_step: int | None = None,
        rewards: Mapping[str, str] | None = None,
    ) -> None:
        """Write ``config.yaml`` and ``run.json`` with status ``running``. A resumed run keeps its first start time.

        Args:
            seed: the run seed.
            config_yaml: the resolved config.
            command: the command line; None means this process's.
            last_step: step of the checkpoint that a resumed run goes on from, None for a fresh run.
            rewards: what scores responses, with a hash of its code. That it changed since the run began is warned about.
        """
        tree = yaml.safe_load(config_yaml)
        hidden = redact_tree(tree)
        text = config_yaml if hidden == tree else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True)
        self._write_atomically(self.path / CONFIG, text)
        before = self._run()
        earlier = before if last_step is not None else {}
        now, ours = _now(), before.get("pid") == os.getpid()
        resumed = [] if last_step is None else [*earlier.get("resumed", []), {"at": now, "from_step": last_step}]
        changed = sorted(name for name, code in earlier.get("rewards", {}).items() if (rewards or {}).get(name) != code)
        if changed:
            log.warning("the reward is not what it was when the run began: %s", ", ".join(changed))
        self._write_run(
            {
                "status": RunStatus.RUNNING.value,
                "exit_reason": "",
                "started": earlier.get("started", now),
                "resumed": resumed,
                "restarts": before.get("restarts", []) if ours else [],
                "rewards": dict(rewards or {}),
                "plan": before.get("plan", []) if ours else [],
                "memory": {},
                "ended": None,
                "last_step": last_step,
                "seed": seed,
                "command": redact_command(sys.argv if command is None else command),
                "pid": os.getpid(),
                "host": platform.node(),
                "versions": environment.versions(),
                "hardware": environment.hardware(),
                "git": environment.git_state(Path.cwd()),
                "trackers": earlier.get("trackers", {}),
            }
        )

    def update_status(
        self,
        status: RunStatus | str,
        exit_reason: str | None = None,
        *,
        last_step: int | None = None,
        memory: Mapping[str, Mapping[str, float]] | None = None,
    ) -> None:
        """Change the status in ``run.json``, atomically; a status other than ``running`` also sets the end time.

        Args:
            status: what became of the run.
            exit_reason: why.
            last_step: how far it came.
            memory: GiB that each process has held, by ``pool[rank]``.

        Raises:
            ValueError: no such status.
        """
        record = self._run()
        record["status"] = RunStatus(status).value
        record["ended"] = None if record["status"] == RunStatus.RUNNING.value else _now()
        if exit_reason is not None:
            record["exit_reason"] = redact_text(exit_reason)
        if last_step is not None:
            record["last_step"] = last_step
        if memory:
            record["memory"] = {name: dict(held) for name, held in memory.items()}
        self._write_run(record)

    def add_restart(self, reason: str) -> None:
        """Note in ``run.json`` that workers were lost and the run goes on in this process."""
        record = self._run()
        record.setdefault("restarts", []).append({"at": _now(), "reason": redact_text(reason)})
        self._write_run(record)

    def tracker_id(self, tracker: str) -> str | None:
        """The id under which an outside tracker knows this run, so that a resumed run continues the same record."""
        return self._run().get("trackers", {}).get(tracker)

    def set_tracker_id(self, tracker: str, identity: str) -> None:
        """Remember that id in ``run.json``."""
        record = self._run()
        record.setdefault("trackers", {})[tracker] = identity
        self._write_run(record)

    def close(self) -> None:
        """Close ``metrics.jsonl``; the next use opens it again."""
        if self._metrics_file is not None:
            self._metrics_file.close()
            self._metrics_file = None

    def _run(self) -> dict[str, Any]:
        return read_run(self.path) if (self.path / RUN).exists() else {}

    def _write_run(self, record: Mapping[str, Any]) -> None:
        self._write_atomically(self.path / RUN, json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    def _write_atomically(self, path: Path, text: str) -> None:
        beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with disk_errors(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with beside.open("w", encoding="utf-8", newline="\n") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                beside.replace(path)
            finally:
                beside.unlink(missing_ok=True)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
