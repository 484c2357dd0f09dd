"""Write the page ``docs/metrics.md`` from the table of metrics.

Generate it again with ``python -m hone.insight.docs docs/metrics.md``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hone.insight.metric_table import GROUPS
from hone.insight.metrics import is_timing

_HEAD = """# Metrics

<!-- Generated from hone/insight/metric_table.py by `python -m hone.insight.docs docs/metrics.md`. Do not edit. -->

Every step writes one JSON object to `metrics.jsonl` in the run directory; trackers show the same numbers. Several
values of one step (micro-batches, updates, ranks) become one number by the reduction named here: `mean` is weighted by
tokens or sequences, `last` keeps the latest. `<x>` means any text, `<n>` a number. JSON has no numbers that
are not finite: such a value is written as the string `"NaN"`, `"Infinity"` or `"-Infinity"`.

Two runs with one seed on one machine write the same numbers, except for metrics of wall time and memory, marked ⏱.
"""


def metrics_page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    for title, specs in GROUPS.items():
        lines += [f"## {title}", "", "| Metric | Unit | Reduction | Meaning | Look when |", "|---|---|---|---|---|"]
        for spec in specs:
            mark = " ⏱" if is_timing(spec.name) else ""
            cells = [f"`{spec.name}`{mark}", spec.unit, spec.reduction.value, spec.meaning, spec.alarm]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(metrics_page(), encoding="utf-8")
