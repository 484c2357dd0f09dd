"""Coverage of a run: the fate of every prompt that the sampler drew.

    waiting --admit--> in flight --finish--> finished --> trained | filtered | failed | too old
       ^                   |                    |
       +----- returned ----+--------------------+

A *draw* is one row taken from the sampler. Every draw ends in exactly one fate, or is still open: waiting, in flight or finished.
So the fates and the open draws always add up to the number of draws.

:class:`CoverageLedger` records them in ``coverage.jsonl`` of the run directory, :func:`read_coverage` reads the file and checks it;
:mod:`hone.apps.lab.coverage` compares dropped with trained prompts, and shows the result.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from hone.errors import HoneError
from hone.insight.run_files import COVERAGE_FILE, StepLines, read_rows

EQUAL_ANSWERS = "all answers equally good"
"""Filter reason of dynamic sampling. It selects by reward, so a difference in reward is by design."""

NO_VERDICT = "too few verdicts"  # reason of a failed draw: fewer than two of its episodes could be judged
QUARANTINED = "quarantine"  # filter reason of a row that ``data.quarantine`` names


class Stage(StrEnum):
    """Stage of an open draw."""

    WAITING = "waiting"  # taken from the sampler; no episode has begun
    IN_FLIGHT = "in_flight"  # its episodes are being played
    FINISHED = "finished"  # its group is complete and not trained yet


class Fate(StrEnum):
    """End of a draw."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    TOO_OLD = "too_old"  # discarded because it exceeded the staleness bound


@dataclass
class OpenDraw:
    """One draw without a fate."""

    draw: int  # number of the draw over the whole run, from 0
    row: int
    epoch: int  # pass over the data, from 0
    stage: Stage = Stage.WAITING  # current stage
    uid: str = ""  # identity of the prompt group, known from admission
    source: str = ""  # ``data_source`` of the row, known from admission
    prompt_tokens: int | None = None  # length of the prompt, if known


class CoverageLedger:
    """Record of every draw of a run, and of its only fate.

    A wrong order of events is a bug of the caller and raises ValueError, without a change of the ledger.

    >>> from pathlib import Path
    >>> ledger = CoverageLedger(StepLines(Path("coverage.jsonl")))
    >>> first, second = ledger.draw(row=7, epoch=0), ledger.draw(row=2, epoch=0)
    >>> ledger.admit(first, uid="train:7", source="sums")
    >>> ledger.finish(first)
    >>> ledger.trained(ledger.admitted("train:7"), lag=1, reward=0.5, tokens=120.0)
    >>> {name: count for name, count in ledger.counts().items() if count}
    {'drawn': 2, 'waiting': 1, 'trained': 1}

    Args:
        lines: writer of the file; ``RunDirectory.coverage``, which a resumed run rewinds together with the metrics.
    """

    def __init__(self, lines: StepLines) -> None:
        self._lines = lines
        self._drawn = 0
        self._open: dict[int, OpenDraw] = {}
        self._admitted: dict[str, int] = {}  # draw of each uid that is in flight or finished
        self._fates: Counter[str] = Counter()
        self._tokens: dict[str, float] = {}
        self._unwritten: list[dict[str, Any]] = []

    # events ----------------------------------------------------------------------------------------------------------

    def draw(self, row: int, epoch: int) -> int:
        """Record a row taken from the sampler; return the number of the draw."""
        number = self._drawn
        self._open[number] = OpenDraw(number, row, epoch)
        self._drawn += 1
        return number

    def admit(self, draw: int, uid: str, source: str, prompt_tokens: int | None = None) -> None:
        """Record that the episodes of a waiting draw begin. The uid identifies its group until the draw ends."""
        entry = self._at(draw, Stage.WAITING)
        if uid in self._admitted:
            raise ValueError(f"draw {draw} has the uid '{uid}' of draw {self._admitted[uid]}, which is still open")
        entry.stage, entry.uid, entry.source, entry.prompt_tokens = Stage.IN_FLIGHT, uid, source, prompt_tokens
        self._admitted[uid] = draw

    def admitted(self, uid: str) -> int:
        """Return the number of the admitted draw whose group has this uid."""
        if uid not in self._admitted:
            raise ValueError(f"no admitted draw has the uid '{uid}'")
        return self._admitted[uid]

    def finish(self, draw: int) -> None:
        """Record that the group of a draw in flight is complete and waits for training."""
        self._at(draw, Stage.IN_FLIGHT).stage = Stage.FINISHED

    def returned(self, draw: int) -> None:
        """Record that an admitted draw waits again, because its episodes were lost; a later :meth:`admit` plays it."""
        entry = self._at(draw, Stage.IN_FLIGHT, Stage.FINISHED)
        entry.stage = Stage.WAITING
        del self._admitted[entry.uid]

    def trained(self, draw: int, lag: int, reward: float | None = None, tokens: float | None = None) -> None:
        """Record the fate of a finished draw that took part in a weight update.

        Args:
            lag: weight updates between admission and training.
            reward: mean reward of the group.
            tokens: mean response length of the group.
        """
        self._end(draw, Fate.TRAINED, (Stage.FINISHED,), lag=lag, reward=reward, tokens=tokens)

    def filtered(self, draw: int, reason: str, reward: float | None = None, tokens: float | None = None) -> None:
        """Record the fate of an admitted draw that a filter removed, such as :data:`EQUAL_ANSWERS`."""
        self._end(draw, Fate.FILTERED, reason=reason, reward=reward, tokens=tokens)

    def failed(self, draw: int, reason: str, reward: float | None = None, tokens: float | None = None) -> None:
        """Record the fate of an admitted draw whose group failed, such as :data:`NO_VERDICT`; give what is known of reward and tokens."""
        self._end(draw, Fate.FAILED, reason=reason, reward=reward, tokens=tokens)

    def too_old(
        self, draw: int, lag: int | None = None, reward: float | None = None, tokens: float | None = None
    ) -> None:
        """Record the fate of an admitted draw that exceeded the staleness bound."""
        self._end(draw, Fate.TOO_OLD, lag=lag, reward=reward, tokens=tokens)

    def _at(self, draw: int, *stages: Stage) -> OpenDraw:
        """Return an open draw, which must be at one of the stages."""
        entry = self._open.get(draw)
        if entry is None:
            known = 0 <= draw < self._drawn
            raise ValueError(f"draw {draw} already has its fate" if known else f"draw {draw} was never drawn")
        if entry.stage not in stages:
            raise ValueError(f"draw {draw} is {entry.stage}, expected {' or '.join(stages)}")
        return entry

    def _end(
        self, draw: int, fate: Fate, stages: tuple[Stage, ...] = (Stage.IN_FLIGHT, Stage.FINISHED), **facts: Any
    ) -> None:
        entry = self._at(draw, *stages)
        fields = asdict(entry) | {"stage": None, "fate": fate.value} | facts
        fields = {name: value for name, value in fields.items() if _known(value)}
        self._unwritten.append(fields)
        self._tokens[fate.value] = self._tokens.get(fate.value, 0.0) + fields.get("tokens", 0.0)
        del self._open[draw], self._admitted[entry.uid]
        self._fates[fate.value] += 1

    # state -----------------------------------------------------------------------------------------------------------

    def open_draws(self) -> list[OpenDraw]:
        return list(self._open.values())

    def counts(self) -> dict[str, int]:
        """Return the number of draws, and how many are at each stage or have each fate; the latter add up to ``drawn``."""
        stages = Counter(entry.stage.value for entry in self._open.values())
        return {
            "drawn": self._drawn,
            **{stage.value: stages[stage.value] for stage in Stage},
            **{fate.value: self._fates[fate.value] for fate in Fate},
        }

    def token_shares(self) -> dict[str, float]:
        """Return the share of sampled tokens by the fate of their prompt, which add up to 1; empty before the first fate."""
        return shares(self._tokens)

    def write(self, step: int) -> None:
        """Append a line for each draw that got its fate since the last call, and a line with all counts.

        The line with the counts is the last of the step: a step without it was interrupted while it was written.

        Raises:
            ValueError: this step, or a later one, was written before.
            HoneError: the disk is full.
        """
        open_by_epoch: dict[str, Counter[str]] = {}
        for entry in self._open.values():
            open_by_epoch.setdefault(str(entry.epoch), Counter())[entry.stage.value] += 1
        self._lines.append(step, [*self._unwritten, {"counts": self.counts(), "open": open_by_epoch}])
        self._unwritten = []

    def state_dict(self) -> dict[str, Any]:
        """Return the open draws, the totals, and the lines that are not written yet, as JSON values."""
        return {
            "drawn": self._drawn,
            "fates": dict(self._fates),
            "tokens": dict(self._tokens),
            "open": [asdict(entry) | {"stage": entry.stage.value} for entry in self._open.values()],
            "unwritten": [dict(record) for record in self._unwritten],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint; open draws keep their stages (see :meth:`returned`)."""
        entries = [OpenDraw(**{**fields, "stage": Stage(fields["stage"])}) for fields in state["open"]]
        self._open = {entry.draw: entry for entry in entries}
        self._admitted = {entry.uid: entry.draw for entry in entries if entry.stage is not Stage.WAITING}
        self._drawn, self._fates, self._tokens = state["drawn"], Counter(state["fates"]), dict(state["tokens"])
        self._unwritten = [dict(record) for record in state["unwritten"]]


def _known(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def shares(amounts: Mapping[str, float]) -> dict[str, float]:
    total = sum(amounts.values())
    return {name: amount / total for name, amount in amounts.items()} if total else {}


def coverage_metrics(ledger: CoverageLedger) -> dict[str, float]:
    """Return the metrics ``coverage/*`` of a ledger."""
    counts = ledger.counts()
    open_draws = sum(counts[stage.value] for stage in Stage)
    names = ("drawn", *(fate.value for fate in Fate))
    return {
        **{f"coverage/{name}": float(counts[name]) for name in names},
        "coverage/open": float(open_draws),
        **{f"coverage/{fate}_token_share": share for fate, share in ledger.token_shares().items()},
    }


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


__all__ = [
    "EQUAL_ANSWERS",
    "NO_VERDICT",
    "QUARANTINED",
    "CoverageLedger",
    "Fate",
    "OpenDraw",
    "Stage",
    "coverage_metrics",
]
