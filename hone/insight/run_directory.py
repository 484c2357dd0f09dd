"""The directory that a run writes.

    <path>/
      config.yaml             the resolved config, credentials hidden
      run.json                versions, hardware, seed, git state, command, status, exit reason, times, last step
      metrics.jsonl           one object a step
      rollouts/step_<N>.jsonl       every sample of chosen steps: tokens, text, mask, scores
      validation/step_<N>.jsonl     validation samples
      checkpoints/step_<N>/         written by the trainer

Every file except ``metrics.jsonl`` is written beside and renamed into place. ``metrics.jsonl`` grows by whole lines,
each flushed; what a kill leaves of a last line is dropped when the run is opened again.
"""

from __future__ import annotations

import datetime
import errno
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, StrEnum
from pathlib import Path
from typing import IO, Any

import yaml

from hone.data.types import Trajectory
from hone.errors import HoneError
from hone.insight import environment
from hone.insight.redaction import redact_command, redact_text, redact_tree

CONFIG, RUN, METRICS_FILE = "config.yaml", "run.json", "metrics.jsonl"
_STEP_FILE = re.compile(r"step_(\d+)\.jsonl")


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
        self.path = Path(path)
        self.metrics_path = self.path / METRICS_FILE
        self.rollouts, self.validation = self.path / "rollouts", self.path / "validation"
        self.checkpoints = self.path / "checkpoints"
        self._metrics_file: IO[str] | None = None
        self._last_step: int | None = None
        with disk_errors(self.path):
            for folder in (self.path, self.rollouts, self.validation, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK):
            raise _unwritable(self.path, "no permission to write")

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
            {"step": step, **{name: _encode(float(value)) for name, value in metrics.items()}}, allow_nan=False
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
        rows = list(_read_rows(self.metrics_path)) if self.metrics_path.exists() else []
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
                    rows = list(_read_rows(self.metrics_path))
                    os.truncate(self.metrics_path, sum(len(line.encode()) + 1 for _, line in rows))
                    self._last_step = rows[-1][0] if rows else None
                self._metrics_file = self.metrics_path.open("a", encoding="utf-8", newline="\n")
        return self._metrics_file

    # samples ---------------------------------------------------------------------------------------------------------

    def write_rollouts(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write the samples of a training step (see :func:`trajectory_record`), one object a line."""
        return self.write_records(self.rollouts / f"step_{step}.jsonl", records)

    def write_validation(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write validation samples, one object a line."""
        return self.write_records(self.validation / f"step_{step}.jsonl", records)

    def write_records(self, path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write any records as JSON lines, atomically; returns ``path``."""
        lines = (json.dumps(_jsonable(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        self._write_atomically(path, "".join(lines))
        return path

    # the run itself --------------------------------------------------------------------------------------------------

    def start(
        self, *, seed: int, config_yaml: str, command: list[str] | None = None, resumed_from: int | None = None
    ) -> None:
        """Write ``config.yaml`` and ``run.json`` with status ``running``. A resumed run keeps its first start time.

        Args:
            seed: the run seed.
            config_yaml: the resolved config.
            command: the command line; None means this process's.
            resumed_from: step of the checkpoint that the run goes on from, None for a fresh one.
        """
        tree = yaml.safe_load(config_yaml)
        hidden = redact_tree(tree)
        text = config_yaml if hidden == tree else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True)
        self._write_atomically(self.path / CONFIG, text)
        earlier = self._run() if resumed_from is not None else {}
        now = _now()
        resumed = [] if resumed_from is None else [*earlier.get("resumed", []), {"at": now, "from_step": resumed_from}]
        self._write_run(
            {
                "status": RunStatus.RUNNING.value,
                "exit_reason": "",
                "started": earlier.get("started", now),
                "resumed": [*earlier.get("resumed", []), {"at": now, "from_step": resumed_from}][
                    : 0 if resumed_from is None else None
                ],
                "ended": None,
                "last_step": resumed_from,
                "seed": seed,
                "command": redact_command(sys.argv if command is None else command),
                "pid": os.getpid(),
                "versions": environment.versions(),
                "hardware": environment.hardware(),
                "git": environment.git_state(Path.cwd()),
                "trackers": earlier.get("trackers", {}),
            }
        )

    def update_status(
        self, status: RunStatus | str, exit_reason: str | None = None, *, last_step: int | None = None
    ) -> None:
        """Change the status in ``run.json``, atomically; a status other than ``running`` also sets the end time.

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


# reading -------------------------------------------------------------------------------------------------------------


def read_run(path: str | Path) -> dict[str, Any]:
    """``run.json`` of a run directory.

    Raises:
        HoneError: it is missing or not JSON.
    """
    file = Path(path) / RUN
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HoneError("no such file", where=str(file), fix="name a directory that a run has written") from None
    except json.JSONDecodeError as error:
        raise HoneError(f"not JSON: {error}", where=str(file), fix="restore the file or remove the directory") from None


def read_metrics(path: str | Path) -> list[dict[str, float]]:
    """All lines of a ``metrics.jsonl`` (or of the run directory that holds it), each with its ``step``.

    A half-written last line is left out. ``"NaN"``, ``"Infinity"`` and ``"-Infinity"`` become floats again.
    """
    path = Path(path)
    file = path / METRICS_FILE if path.is_dir() else path
    if not file.exists():
        return []
    rows = [json.loads(line) for _, line in _read_rows(file)]
    return [{name: float(value) if isinstance(value, str) else value for name, value in row.items()} for row in rows]


def _read_rows(file: Path) -> Iterator[tuple[int, str]]:
    """(step, line) of every whole line; what follows the last line break is half a line."""
    lines = file.read_bytes().split(b"\n")[:-1]
    for number, raw in enumerate(lines, 1):
        try:
            line = raw.decode()
            yield int(json.loads(line)["step"]), line
        except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
            if number == len(lines):  # a crash of the machine can leave a last line of garbage
                return
            raise HoneError(
                f"line {number} of {len(lines)} is not a JSON object with a step",
                where=str(file),
                why="the history of the run cannot be continued",
                fix="remove the line, or start a new run directory with trainer.experiment_name=...",
            ) from None


def trajectory_record(
    trajectory: Trajectory,
    *,
    score: float,
    terms: Mapping[str, float] | None = None,
    extra: Mapping[str, Any] | None = None,
    error: str | None = None,
    prompt_text: str | None = None,
) -> dict[str, Any]:
    """One sample as written to ``rollouts/`` and ``validation/``: tokens, text, mask and scores.

    Args:
        trajectory: the episode.
        score: its reward.
        terms: named parts of the reward.
        extra: what else the scorer returned.
        error: why scoring failed.
        prompt_text: the decoded prompt.
    """
    return {
        "uid": trajectory.uid,
        "index": trajectory.index,
        "data_source": trajectory.sample.data_source,
        "prompt": prompt_text,
        "text": trajectory.text,
        "ground_truth": trajectory.sample.ground_truth,
        "score": score,
        "terms": dict(terms or {}),
        "extra": dict(extra or {}),
        "error": error,
        "stop_reason": trajectory.stop_reason.value,
        "prompt_ids": trajectory.prompt_ids,
        "response_ids": trajectory.response_ids,
        "response_mask": trajectory.response_mask,
        "rollout_log_probs": trajectory.rollout_log_probs,
        "weight_versions": list(trajectory.weight_versions),
        "seconds": trajectory.seconds,
    }


# errors and encoding -------------------------------------------------------------------------------------------------


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what a disk refuses (full, read-only, forbidden) into a :class:`HoneError` with the numbers and the fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise HoneError(
                f"the disk is full{_free_space(path)}",
                where=str(path),
                why="metrics, samples and checkpoints can no longer be saved; everything saved before is intact",
                fix="free space and start the same command again (trainer.resume_mode=auto), "
                "or choose another disk with trainer.default_local_dir=...",
                code="E-disk-full",
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            raise _unwritable(path, error.strerror or str(error)) from error
        raise


def _unwritable(path: Path, reason: str) -> HoneError:
    return HoneError(
        f"cannot write: {reason}",
        where=str(path),
        why="a run keeps its config, metrics and checkpoints there",
        fix="choose a directory that you may write to: trainer.default_local_dir=...",
        code="E-run-directory",
    )


def _free_space(path: Path) -> str:
    existing = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    if existing is None:
        return ""
    usage = shutil.disk_usage(existing)
    return f" ({usage.free / 2**20:.0f} MB of {usage.total / 2**30:.1f} GB free)"


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _encode(value: float) -> float | str:
    """A JSON number, or the name of a number that JSON lacks."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _jsonable(value: Any) -> Any:
    """Plain JSON values: arrays become lists, enums their value, what JSON has no word for its text."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_jsonable(entry) for entry in value]
    if isinstance(value, Enum):
        return _jsonable(value.value)
    if isinstance(value, float):
        return _encode(value)
    if value is None or isinstance(value, (str, int)):
        return value
    return _jsonable(value.tolist()) if hasattr(value, "tolist") else str(value)
