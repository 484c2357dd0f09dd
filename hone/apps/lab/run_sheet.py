"""Run sheet: one page of Markdown on a run, with its configuration, curve, notes and verdict.

Notes are in ``notes.jsonl`` of the run directory, one object per note; only `hone runs note` writes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hone.apps.lab.compare import ABSENT, Run, headline_metrics, summarise, training_keys
from hone.apps.lab.confidence import ArmComparison
from hone.apps.lab.paired import Verdict
from hone.errors import HoneError
from hone.insight.curves import points, text_chart
from hone.insight.run_files import disk_errors, now

NOTES = "notes.jsonl"
_WIDTH = 60


def add_note(path: Path, text: str) -> None:
    if not text.strip():
        raise HoneError("the note is empty", fix='hone runs note RUN "what you saw"', code="E-runs")
    line = json.dumps({"at": now(), "text": text.strip()}, ensure_ascii=False)
    with disk_errors(path / NOTES), (path / NOTES).open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def read_notes(path: Path) -> list[dict[str, str]]:
    """Return the notes of a run directory, oldest first."""
    file = path / NOTES
    notes = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines() if file.is_file() else (), 1):
        try:
            note = json.loads(line)
            notes.append({"at": str(note["at"]), "text": str(note["text"])})
        except (json.JSONDecodeError, KeyError, TypeError):
            raise HoneError(
                f"line {number} is not a note", where=str(file), fix="remove the line", code="E-runs"
            ) from None
    return notes


def sheet(
    run: Run,
    base_name: str,  # name of what its configuration is compared with
    base_config: Mapping[str, Any],  # that configuration, dotted key to value
    *,
    metric: str | None,  # metric of the curve; None means the most important one
    verdict: ArmComparison | None,  # comparison with the base run; None if the base is not a run
    notes: Sequence[Mapping[str, str]],
    picture: str | None = None,  # path of a picture of the curve relative to the page, or None
) -> str:
    """Return the page of a run as Markdown."""
    return "\n".join(
        [
            f"# {run.name}",
            "",
            *_head(run),
            "",
            f"## Configuration against {base_name}",
            "",
            *_config(run.config, base_config, base_name),
            "",
            "## Curve",
            "",
            *_curve(run, metric, picture),
            "",
            "## Notes",
            "",
            *([f"- {note['at'][:16].replace('T', ' ')}: {note['text']}" for note in notes] or ["none"]),
            "",
            "## Verdict",
            "",
            *_verdict(verdict),
            "",
        ]
    )


def _head(run: Run) -> list[str]:
    reason = run.record.get("exit_reason")
    starts = run.record.get("starts") or [run.record]
    commits = dict.fromkeys((start.get("git") or {}).get("commit") for start in starts)
    facts = {
        "status": run.status + (f", {reason}" if reason else ""),
        "started": str(run.record.get("started", ""))[:16].replace("T", " "),
        "duration": "" if run.seconds is None else f"{run.seconds:.0f} s",
        "steps": str(run.steps),
        "seed": str(run.record.get("seed", "")),
        "hone": str((run.record.get("versions") or {}).get("hone", "")),
        "commit": ", then ".join(commit for commit in commits if commit),
        "command": f"`{' '.join(['hone', *run.record.get('command', [])[1:]])}`",
    }
    return [f"- {name}: {value}" for name, value in facts.items() if value]


def _config(config: Mapping[str, Any], base: Mapping[str, Any], base_name: str) -> list[str]:
    mine, other = training_keys(config), training_keys(base)
    keys = [key for key in {**mine, **other} if mine.get(key, ABSENT) != other.get(key, ABSENT)]
    if not keys:
        return ["equal"]
    rows = [f"| {key} | {_cell(other.get(key, ABSENT))} | {_cell(mine.get(key, ABSENT))} |" for key in keys]
    return [f"| key | {base_name} | this run |", "|---|---|---|", *rows]


def _cell(value: Any) -> str:
    return f"`{str(value).replace('|', chr(92) + '|')}`"


def _curve(run: Run, metric: str | None, picture: str | None) -> list[str]:
    name = metric or next(iter(headline_metrics([run])), None)
    if name is None:
        return ["no metrics yet"]
    curve = points(run.metrics, name)
    summary = summarise(run, name)
    if summary is None:
        return [f"no values of {name}"]
    best = "" if summary.best is None else f", best {summary.best:.4g} at step {summary.best_step}"
    lines = [f"{name}: first {summary.first:.4g}, last {summary.last:.4g}{best}", ""]
    if picture is not None:
        return [*lines, f"![{name}]({picture})"]
    return [*lines, "```text", text_chart(curve, width=_WIDTH), "```"]


def _verdict(item: ArmComparison | None) -> list[str]:
    if item is None:
        return ["none: name a run to compare with (--base)"]
    result = item.result
    words = {
        Verdict.SECOND_BETTER: "better than the base",
        Verdict.FIRST_BETTER: "worse than the base",
        Verdict.WITHIN_NOISE: "within noise",
    }
    known = not math.isnan(result.low)
    interval = f", {result.level:.0%} interval {result.low:+.4g} to {result.high:+.4g}" if known else ""
    lines = [
        f"**{words[result.verdict] if known else 'undecided'}**: {item.score}, {result.first:.4g} -> {result.second:.4g}, "
        f"difference {result.difference:+.4g}{interval} ({result.seeds} x {result.prompts} paired scores)"
    ]
    lines += [f"{line[:1].upper()}{line[1:]}." for line in item.limits]
    if result.seeds_needed is not None:
        lines.append(f"Seeds needed to find this difference with 80 % power: {result.seeds_needed}.")
    return lines
