"""The page ``docs/metrics.md``, from the table of metrics."""

from __future__ import annotations

from hone.insight.detectors import DETECTORS
from hone.insight.metrics import GROUPS, is_timing

_HEAD = """# Metrics

<!-- Generated from hone/insight/metric_table.yaml by scripts/make_docs. Do not edit. -->

Every step writes one JSON object to `metrics.jsonl` in the run directory; trackers show the same numbers. Several
values of one step (micro-batches, updates, ranks) become one number by the reduction named here: `mean` is weighted by
tokens or sequences, `last` keeps the latest. `<x>` means any text, `<n>` a number. JSON has no numbers that
are not finite: such a value is written as the string `"NaN"`, `"Infinity"` or `"-Infinity"`.

The last column names the detectors that act on a metric: they give an alert, and may end the run
([detectors.md](detectors.md)). No other metric acts by itself.

Two runs with one seed on one machine write the same numbers, except for metrics of wall time and memory, marked ⏱.
"""

_NOTES = {
    "Fates of drawn prompts": """Every prompt that the sampler draws ends in exactly one way: trained, filtered, failed or too old. Until then it is open.
`coverage.jsonl` in the run directory has one line per prompt with its fate, and one line per step with the counts, which always
add up to the prompts drawn. A resumed run continues both exactly. A prompt is one dataset row of one pass; all its
answers together are its group.

`hone runs coverage RUN` shows the fates by epoch, the lags of trained prompts, the reasons of dropped ones, and the prompts that a
whole epoch never trained; `--png` draws them and `--json` prints everything. The exit code is 1 if the file contradicts itself.

The command also says whether dropped prompts differ from trained ones in prompt length, response length, mean reward or source. It
names a bias only if a permutation test gives p < 0.01 (Holm-corrected over all comparisons) and the effect is at least moderate:
|Cliff's delta| >= 0.33, or for sources a total variation of 0.2 beyond chance. Prompts are compared with others of the same period of
the run, so trends of the run are no bias, and all draws of one row count together. The difference in reward that dynamic sampling
makes is by design and is not counted.
""",
}
"""Text below the title of a section."""


def metrics_page() -> str:
    """Return the page as Markdown."""
    lines, acting = [_HEAD], _detectors_by_metric()
    for title, specs in GROUPS.items():
        lines += [
            f"## {title}",
            "",
            *([_NOTES[title]] if title in _NOTES else []),
            "| Metric | Unit | Reduction | Meaning | Detectors |",
            "|---|---|---|---|---|",
        ]
        for spec in specs:
            mark = " ⏱" if is_timing(spec.name) else ""
            cells = [f"`{spec.name}`{mark}", spec.unit, spec.reduction.value, spec.meaning, acting.get(spec.name, "")]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _detectors_by_metric() -> dict[str, str]:
    """Return the names of the detectors that act on each metric."""
    names = {name for detector in DETECTORS for name in detector.reads}
    return {
        name: ", ".join(f"`{detector.name}`" for detector in DETECTORS if name in detector.reads)
        for name in sorted(names)
    }
