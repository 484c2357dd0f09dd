"""Read ``coverage.jsonl`` and check that the fates add up to what was drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.insight.coverage.ledger import Fate, Stage
from hone.insight.run_files import COVERAGE_FILE, read_rows


@dataclass(frozen=True, slots=True)
class EndedDraw:
    """One draw with its fate, as in ``coverage.jsonl``; None is an unknown value."""

    step: int  # step in which the draw got its fate
    draw: int  # number of the draw over the whole run
    row: int
    epoch: int
    uid: str
    source: str
    fate: str
    lag: int | None = None  # weight updates between admission and training
    reason: str | None = None  # reason of a filter or a failure
    reward: float | None = None  # mean reward of the group
    tokens: float | None = None  # mean response length of the group
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Coverage:
    """Contents of a ``coverage.jsonl``."""

    draws: list[EndedDraw] = field(default_factory=list)  # draws with a fate, in order of their fates
    # step to its counts, as :meth:`CoverageLedger.counts` returned them
    steps: dict[int, dict[str, int]] = field(default_factory=dict)
    # number of open draws at the last step, by epoch and stage
    open_by_epoch: dict[int, dict[str, int]] = field(default_factory=dict)
    problem: str | None = None  # first violated invariant; None if the file is consistent

    @property
    def counts(self) -> dict[str, int]:
        return self.steps[max(self.steps)]


def read_coverage(path: str | Path) -> Coverage:
    """Read the coverage of a run directory. Lines of a step that was interrupted while it was written are left out.

    Raises HoneError: the run has none, or a line is damaged.
    """
    file = Path(path) / COVERAGE_FILE
    draws: list[EndedDraw] = []
    written: list[EndedDraw] = []  # of a step whose counts were not read yet
    steps: dict[int, dict[str, int]] = {}
    open_by_epoch: dict[int, dict[str, int]] = {}
    check = _Check()
    for step, line in read_rows(file) if file.is_file() else ():
        record = json.loads(line)
        try:
            if "counts" not in record:
                written.append(EndedDraw(**record))
                continue
            steps[step] = {name: int(record["counts"][name]) for name in ("drawn", *Stage, *Fate)}
            open_by_epoch = {int(epoch): dict(stages) for epoch, stages in record["open"].items()}
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise HoneError(
                f"a line of step {step} is neither the fate of a draw nor a line of counts: {line[:200]}",
                where=str(file),
                why=f"its fields are wrong ({type(error).__name__}: {error})",
                fix="restore the file from a backup, or remove it: training does not read it",
                code="E-runs",
            ) from None
        check.step(step, written, steps[step], open_by_epoch)
        draws += written
        written = []
    if not steps:
        raise HoneError(
            "the run has no record of the fates of its prompts",
            where=str(file),
            why="the file is written by `hone train`, one step at a time",
            fix="name a run of `hone train` with at least one step",
            code="E-runs",
        )
    return Coverage(draws, steps, open_by_epoch, check.problem)


class _Check:
    """Invariants of the file, checked step by step; ``problem`` keeps the first violation."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self._seen: dict[int, int] = {}  # draw to the step of its fate
        self._fates: dict[str, int] = dict.fromkeys(Fate, 0)
        self._drawn = 0

    def step(
        self, step: int, written: list[EndedDraw], counts: Mapping[str, int], open_by_epoch: Mapping[int, Any]
    ) -> None:
        """Check the lines of one step against its counts and those of the steps before."""
        drawn = counts["drawn"]
        for ended in written:
            if ended.fate not in self._fates:
                return self._violated(f"draw {ended.draw} has the unknown fate '{ended.fate}' in step {step}")
            if ended.draw in self._seen:
                before = self._seen[ended.draw]
                return self._violated(f"draw {ended.draw} has two fates: in step {before} and in step {step}")
            if ended.step != step:
                return self._violated(f"step {ended.step} has no line of counts before step {step}")
            if not 0 <= ended.draw < drawn:
                return self._violated(f"draw {ended.draw} has a fate in step {step}, when {drawn} were drawn")
            self._seen[ended.draw] = step
            self._fates[ended.fate] += 1
        if drawn < self._drawn:
            return self._violated(f"{drawn} prompts were drawn until step {step}, and {self._drawn} before it")
        self._drawn = drawn
        for fate, number in self._fates.items():
            if counts[fate] != number:
                return self._violated(
                    f"step {step} counts {counts[fate]} {fate} prompts, and the file has the lines of {number}"
                )
        total = sum(counts[name] for name in (*Stage, *Fate))
        if total != drawn:
            return self._violated(f"the fates and open prompts of step {step} add up to {total}, not to {drawn} drawn")
        for stage in Stage:
            number = sum(stages.get(stage, 0) for stages in open_by_epoch.values())
            if number != counts[stage]:
                return self._violated(f"step {step} counts {counts[stage]} prompts {stage}, and {number} by epoch")
        return None

    def _violated(self, sentence: str) -> None:
        self.problem = self.problem or sentence
