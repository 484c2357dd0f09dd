"""Ledger of draws: the writer of ``coverage.jsonl``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from hone.insight.step_lines import StepLines

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
