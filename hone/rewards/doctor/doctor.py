"""The environment doctor of a run: observes each step, probes the verifier, and reports each defect once per cool-down."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from hone.config.reward import RewardConfig
from hone.data.types import Trajectory
from hone.rewards.doctor.detectors import Finding, findings
from hone.rewards.doctor.history import History
from hone.rewards.doctor.probing import Prober, probes_of
from hone.rewards.score import Score

log = logging.getLogger(__name__)

FILE, QUARANTINE = "doctor.jsonl", "quarantine.jsonl"
"""Files in the run directory: all findings, and the rows that they propose to leave out."""
_SHOWN_TASKS = 5


class EnvironmentDoctor:
    """Observer of a run's episodes and verdicts.

    Its record is empty in a resumed process. It changes neither rewards nor data.

    Args:
        config: config block ``reward``.
        folder: run directory, which receives ``doctor.jsonl`` and ``quarantine.jsonl``.
        probes: whether the verifier may be called again: it costs nothing and has no other effect.
    """

    def __init__(self, config: RewardConfig, folder: Path, *, probes: bool) -> None:
        self._settings, self._folder = config.doctor, folder
        self.history = History()
        self._prober = Prober(config) if probes and config.doctor.probes_per_step else None
        self._reported: dict[tuple[str, str], tuple[int, set[str]]] = {}
        self._quarantined: set[str] = set()

    def observe(self, step: int, trajectories: Sequence[Trajectory], scores: Sequence[Score]) -> list[Finding]:
        """Add a step's episodes, and report defects that are new or whose cool-down is over.

        Returns:
            The reported findings.
        """
        self.history.observe(trajectories, scores)
        if self._prober is not None:
            self._prober.collect(self.history)
            self._prober.submit(probes_of(trajectories, scores, self._settings.probes_per_step))
        return self.report(step)

    def report(self, step: int) -> list[Finding]:
        """Write and log the findings that are due, and return them."""
        due = [finding for finding in findings(self.history) if self._is_due(step, finding)]
        for finding in due:
            self._write(step, finding)
        return due

    def finish(self, step: int) -> list[Finding]:
        """Wait for the last probes, and report what they show."""
        if self._prober is not None:
            self._prober.collect(self.history, wait=True)
        return self.report(step)

    def close(self) -> None:
        """End the processes of the probes."""
        if self._prober is not None:
            self._prober.close()

    def _is_due(self, step: int, finding: Finding) -> bool:
        key = finding.kind, finding.about
        last, tasks = self._reported.get(key, (None, set()))
        if last is not None and (
            step - last < self._settings.cooldown or (finding.tasks and tasks >= set(finding.tasks))
        ):
            return False
        self._reported[key] = step, tasks | set(finding.tasks)
        return True

    def _write(self, step: int, finding: Finding) -> None:
        shown = ", ".join(finding.tasks[:_SHOWN_TASKS]) + (", ..." if len(finding.tasks) > _SHOWN_TASKS else "")
        new = [name for name in finding.tasks if name not in self._quarantined]
        self._quarantined.update(new)
        self._append(FILE, [{"step": step, **vars(finding)}])
        self._append(QUARANTINE, [{"uid": name, "reason": finding.kind, "step": step} for name in new])
        log.warning(
            "environment doctor, step %d: %s%s.\n  Why it matters: %s\n  Fix: %s%s",
            step,
            finding.what,
            f" ({shown})" if shown else "",
            finding.why,
            finding.fix,
            f"; data.quarantine={self._folder / QUARANTINE} leaves them out" if finding.tasks else "",
        )
        for episode in finding.episodes:
            score = "no verdict" if episode["score"] is None else f"score {episode['score']:g}"
            log.warning("  row %s, episode %s, %s: %r", episode["uid"], episode["index"], score, episode["text"][-200:])

    def _append(self, name: str, records: list[dict]) -> None:
        if records:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
