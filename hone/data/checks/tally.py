"""Count rows that share a problem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from hone.data.files import Row
from hone.errors import DataError, Finding


@dataclass(frozen=True)
class Problem:
    """A kind of problem of rows: its code, why it matters, the fix, and whether it stops a run."""

    code: str
    what: str
    why: str
    fix: str
    stops: bool = True


@dataclass
class Tally:
    """Rows with problems, by kind.

    >>> tally = Tally(3)
    >>> tally.add(Row("a:1", "a.jsonl, row 1", {}), Problem("R44", "ground_truth is ''", "why", "fix"))
    >>> [finding.error.what for finding in tally.findings()]
    ["1 of 3 rows: ground_truth is ''"]
    """

    total: int
    counts: dict[Problem, int] = field(default_factory=dict)
    first: dict[Problem, tuple[str, str]] = field(default_factory=dict)

    def add(self, row: Row, problem: Problem, detail: str = "") -> None:
        """Count ``row`` under ``problem``; ``detail`` is shown for the first such row."""
        self.counts[problem] = self.counts.get(problem, 0) + 1
        self.first.setdefault(problem, (row.where, detail))

    def findings(self, least: int = 1) -> Iterator[Finding]:
        """Yield one finding per problem that at least ``least`` rows have, the most frequent first."""
        for problem, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            if count >= least:
                where, detail = self.first[problem]
                what = f"{count} of {self.total} rows: {problem.what}" + (f" (first: {detail})" if detail else "")
                error = DataError(what, why=problem.why, fix=problem.fix, where=where, code=problem.code)
                yield Finding(error, problem.stops)
