"""Directory of a run.

    <path>/
      config.yaml             the resolved config, credentials hidden
      run.json                versions, hardware, seed, git state, command, status, exit reason, times, last step
      metrics.jsonl           one object per step; a second one for a validation that ended after its step
      coverage.jsonl          the fate of every drawn prompt, see :mod:`hone.insight.coverage`
      alerts.jsonl            one object per alert, see :mod:`hone.insight.detectors`
      rollouts/step_<N>.parquet     samples of a step, see :mod:`hone.insight.archive`
      rollouts/step_<N>.txt         some episodes of several turns, as text
      rollouts/vocabulary.parquet   text of every token id
      validation/step_<N>.parquet   validation samples
      suites/step_<N>/        what suites of other packages measured, see :mod:`hone.agents.suites`
      microbatches/step_<N>/        written by the actor, see :mod:`hone.training.microbatches`
      checkpoints/step_<N>/         written by the trainer
      profile/step_<N>.*      profiles of updates, see :mod:`hone.training.step_profile`
      timeline/               what each process did and when, see :mod:`hone.insight.timeline`
      replicas.json           answer to `hone runs engines`, see :mod:`hone.insight.stop_requests`
      STOP                    request to stop the run, see :mod:`hone.insight.stop_requests`
      run.lock                the process that trains in it, see :mod:`hone.insight.run_lock`

``metrics.jsonl``, ``coverage.jsonl`` and ``alerts.jsonl`` grow by whole lines, see :mod:`hone.insight.run_files`. Every other file is written
under another name and renamed into place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import operator
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from hone.data.images import ImageData
from hone.insight import environment
from hone.insight.archive.read import write_image
from hone.insight.archive.write import to_table, write_step
from hone.insight.records import sampled_traces, trajectory_record
from hone.insight.redaction import redact_command, redact_text, redact_tree
from hone.insight.run_files import (
    ALERTS_FILE,
    CONFIG,
    COVERAGE_FILE,
    METRICS_FILE,
    RUN,
    StepLines,
    disk_errors,
    encode_number,
    jsonable,
    now,
    read_alerts,
    read_metrics,
    read_run,
    unwritable,
    write_atomically,
)
from hone.text import read_yaml

__all__ = ["RunDirectory", "RunStatus", "read_metrics", "read_run", "trajectory_record"]

if TYPE_CHECKING:
    import pyarrow as pa

_HASHED = 2**28  # bytes at the beginning and at the end of a file of data that its hash covers
log = logging.getLogger("hone.insight")

_STEP_FILE = re.compile(r"step_(\d+)\.(?:parquet|txt)")


class RunStatus(StrEnum):
    """State of a run."""

    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"  # ended by a signal, resumable
    FAILED = "failed"


class RunDirectory:
    """Writer of one run. Only the driver process has one.

    >>> run = RunDirectory("runs/hone/demo")                            # doctest: +SKIP
    >>> run.start(seed=1, config_yaml=to_yaml(config))                  # doctest: +SKIP
    >>> run.log_metrics(1, {"actor/pg_loss": 0.1})                      # doctest: +SKIP
    >>> run.update_status("finished", exit_reason="all steps done")     # doctest: +SKIP

    Raises:
        HoneError: the directory cannot be created or written.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.metrics_path = self.path / METRICS_FILE
        self.rollouts, self.validation = self.path / "rollouts", self.path / "validation"
        self.checkpoints = self.path / "checkpoints"
        self._metrics, self.coverage = StepLines(self.metrics_path), StepLines(self.path / COVERAGE_FILE)
        self._alerts = StepLines(self.path / ALERTS_FILE)
        with disk_errors(self.path):
            for folder in (self.path, self.rollouts, self.validation, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
        if not os.access(self.path, os.W_OK):
            raise unwritable(self.path, "permission denied")

    # metrics ---------------------------------------------------------------------------------------------------------

    @property
    def last_step(self) -> int | None:
        return self._metrics.last_step

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append the metrics of a step as one flushed line. :func:`read_metrics` restores the numbers exactly.

        Raises:
            ValueError: a later step has a line already, or this step has one of these metrics; call :meth:`rewind` first on resume.
            HoneError: the disk is full.
        """
        self._metrics.append(step, [{name: encode_number(float(value)) for name, value in metrics.items()}])

    def rewind(self, step: int) -> int:
        """Remove everything after ``step``, for a run that resumes from that step's checkpoint.

        Drops later lines of ``metrics.jsonl``, ``coverage.jsonl`` and ``alerts.jsonl``, and later rollout and validation files.
        Checkpoints and micro-batches are kept. A run that starts again in a used directory rewinds to -1: step 0 is the validation before training.

        Returns:
            Number of dropped metric lines.

        Raises:
            HoneError: a line other than the last is not JSON.
        """
        dropped = self._metrics.rewind(step)
        self.coverage.rewind(step)
        if self._alerts.rewind(step):
            self._count_alerts()
        for folder in (self.rollouts, self.validation):
            for file in folder.iterdir():
                match = _STEP_FILE.fullmatch(file.name)
                if match and int(match[1]) > step:
                    file.unlink()
        return dropped

    def add_alerts(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        """Append the alerts of a step to ``alerts.jsonl``, and count them in ``run.json``.

        Raises:
            ValueError: this step or a later one has alerts already; call :meth:`rewind` first on resume.
            HoneError: the disk is full.
        """
        self._alerts.append(step, records)
        self._count_alerts()

    def _count_alerts(self) -> None:
        counts = Counter(alert["detector"] for alert in read_alerts(self.path))
        self._write_run(self._run() | {"alerts": dict(sorted(counts.items()))})

    # samples ---------------------------------------------------------------------------------------------------------

    def write_rollouts(self, step: int, table: pa.Table, *, rows: int | None = None) -> Path:
        """Write the samples of a training step to the archive, and some episodes as text. ``rows``: number of sequences
        of the step; None if all are in the table.
        """
        traces = sampled_traces(table)
        if traces is not None:
            write_atomically(self.rollouts / f"step_{step}.txt", traces)
        return write_step(self.rollouts, step, table, rows=rows)

    def write_images(self, images: Iterable[ImageData], archive: Path) -> None:
        """Write the images of archived samples, each once, under the key that its token ids have."""
        for image in {image.key: image for image in images}.values():
            write_image(archive, image)

    def write_validation(self, step: int, records: Iterable[Mapping[str, Any]]) -> Path:
        """Write validation samples (see :func:`trajectory_record`) to the archive."""
        table = to_table({**record, "step": step, "fate": "validation"} for record in records)
        return write_step(self.validation, step, table)

    def write_records(self, path: Path, records: Iterable[Mapping[str, Any]]) -> Path:
        lines = (json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n" for record in records)
        write_atomically(path, "".join(lines))
        return path

    # the run itself --------------------------------------------------------------------------------------------------

    def expect(self, plan: list[dict[str, Any]], downloads: Mapping[str, Any] | None = None) -> None:
        """Store what this process's run is made of in ``run.json``; :meth:`start` keeps it. ``downloads``: repositories
        of the hub by key, with commits and file hashes.
        """
        self._write_run(self._run() | {"plan": plan, "downloads": dict(downloads or {}), "pid": os.getpid()})

    def start(
        self,
        *,
        seed: int,
        config_yaml: str,
        command: list[str] | None = None,
        last_step: int | None = None,
        rewards: Mapping[str, str] | None = None,
        agent_contract: Mapping[str, str] | None = None,
        flow: Mapping[str, Any] | None = None,
    ) -> None:
        """Write ``config.yaml`` and ``run.json`` with status ``running``. A resumed run keeps its first start time.

        Args:
            last_step: step of the checkpoint that a resumed run continues, None for a fresh run.
            rewards: sources of the scores, with a hash of their code. A change since the start of the run gives a warning.
            agent_contract: version and hashes of what the policy expects as an agent; None or empty for single turns.
            flow: data flow of a step (:func:`hone.trainers.stages.data_flow`); None or empty without stages.
        """
        tree = read_yaml(config_yaml)
        hidden = redact_tree(tree)
        text = config_yaml if hidden == tree else yaml.safe_dump(hidden, sort_keys=False, allow_unicode=True)
        write_atomically(self.path / CONFIG, text)
        before = self._run()
        earlier = before if last_step is not None else {}
        at, ours = now(), before.get("pid") == os.getpid()
        resumed = [] if last_step is None else [*earlier.get("resumed", []), {"at": at, "from_step": last_step}]
        git = environment.git_state(Path.cwd())
        first = [{"at": earlier["started"], "git": earlier.get("git")}] if "started" in earlier else []
        starts = [*earlier.get("starts", first), {"at": at, "git": git, "cwd": str(Path.cwd())}]
        changed = sorted(name for name, code in earlier.get("rewards", {}).items() if (rewards or {}).get(name) != code)
        if changed:
            log.warning("the reward changed since the start of the run: %s", ", ".join(changed))
        for name, old, new in _other_code(earlier, git, versions := environment.versions()):
            log.warning("%s is another than at the start of the run: %s, was %s", name, new, old)
        data = data_hashes(tree)
        if changed := sorted(file for file, digest in earlier.get("data", {}).items() if data.get(file) != digest):
            log.warning(
                "these files of data changed since the start of the run, which draws other rows now: %s",
                ", ".join(changed),
            )
        self._write_run(
            {
                "status": RunStatus.RUNNING.value,
                "exit_reason": "",
                "started": earlier.get("started", at),
                "resumed": resumed,
                "starts": starts,
                "restarts": before.get("restarts", []) if ours else [],
                "rewards": dict(rewards or {}),
                "data": data,
                "agent_contract": dict(agent_contract or {}),
                "flow": dict(flow or {}),
                "plan": before.get("plan", []) if ours else [],
                "downloads": before.get("downloads", {}) if ours else {},
                "memory": earlier.get("memory", {}),
                "ended": None,
                "last_step": last_step,
                "seed": seed,
                "command": redact_command(sys.argv if command is None else command),
                "pid": os.getpid(),
                "host": platform.node(),
                "versions": versions,
                "hardware": environment.hardware(),
                "git": git,
                "trackers": earlier.get("trackers", {}),
                "alerts": earlier.get("alerts", {}),
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

        ``memory``: GiB of each process, by ``pool[rank]``; that of the attempt with the highest ``peak`` stays.

        Raises ValueError: the status does not exist.
        """
        record = self._run()
        record["status"] = RunStatus(status).value
        record["ended"] = None if record["status"] == RunStatus.RUNNING.value else now()
        if exit_reason is not None:
            record["exit_reason"] = redact_text(exit_reason)
        if last_step is not None:
            record["last_step"] = last_step
        if memory:
            before = record.get("memory") or {}
            peak = operator.itemgetter("peak")
            record["memory"] = {name: max(before.get(name, gib), dict(gib), key=peak) for name, gib in memory.items()}
        self._write_run(record)

    def add_restart(self, reason: str) -> None:
        record = self._run()
        record.setdefault("restarts", []).append({"at": now(), "reason": redact_text(reason)})
        self._write_run(record)

    def set_webhook(self, counts: Mapping[str, Any]) -> None:
        self._write_run(self._run() | {"webhook": dict(counts)})

    def tracker_id(self, tracker: str) -> str | None:
        """Return the run's id in an external tracker, so that a resumed run continues the same record."""
        return self._run().get("trackers", {}).get(tracker)

    def set_tracker_id(self, tracker: str, identity: str) -> None:
        record = self._run()
        record.setdefault("trackers", {})[tracker] = identity
        self._write_run(record)

    def close(self) -> None:
        """Close ``metrics.jsonl``, ``coverage.jsonl`` and ``alerts.jsonl``; the next use opens them again."""
        self._metrics.close()
        self._alerts.close()
        self.coverage.close()

    def _run(self) -> dict[str, Any]:
        return read_run(self.path) if (self.path / RUN).exists() else {}

    def _write_run(self, record: Mapping[str, Any]) -> None:
        write_atomically(self.path / RUN, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


def _other_code(
    earlier: Mapping[str, Any], git: Mapping[str, Any] | None, versions: Mapping[str, str]
) -> Iterator[tuple[str, str, str]]:
    """Yield what of the code differs from the record of an earlier start: name, old value and new value."""
    old = earlier.get("git") or {}
    for name in ("commit", "dirty"):
        if git is not None and name in old and old[name] != git[name]:
            yield f"git {name} of the working directory", str(old[name]), str(git[name])
    for package, version in (earlier.get("versions") or {}).items():
        if versions.get(package) != version:
            yield f"version of {package}", str(version), versions.get(package, "none")


def data_hashes(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of each local file of ``data``: of its size, and of its first and last bytes if it is large."""
    data, hashes = tree.get("data"), {}
    for key in ("train_files", "val_files"):
        named = data.get(key) if isinstance(data, Mapping) else None
        for name in [named] if isinstance(named, str) else named or ():
            with contextlib.suppress(OSError, ValueError), Path(name).expanduser().open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                digest = hashlib.sha256(f"{size}\n".encode() + file.read(_HASHED))
                file.seek(max(file.tell(), size - _HASHED))
                digest.update(file.read(_HASHED))
                hashes[str(name)] = digest.hexdigest()
    return hashes
