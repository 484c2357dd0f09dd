"""Report on a dataset as one HTML file with findings, numbers and histograms; it loads nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from hone.errors import Finding

_BINS, _WIDTH, _HEIGHT = 40, 640, 140
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
table { border-collapse: collapse; } td, th { padding: .2rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }
.error { color: #b00020; font-weight: 600; } .warning { color: #8a5a00; font-weight: 600; }
rect { fill: #3366aa; } text { font-size: 11px; fill: #555; } pre { white-space: pre-wrap; }
"""


def html_report(
    title: str, findings: Sequence[Finding], numbers: Mapping[str, Any], lengths: Mapping[str, Sequence[int]]
) -> str:
    """Return the page as text; ``lengths`` are values to draw a histogram of, by name."""
    parts = [f"<h1>{html.escape(title)}</h1>", _findings(findings)]
    parts += [
        f"<h2>{html.escape(name.replace('_', ' '))}</h2>{histogram(values)}"
        for name, values in lengths.items()
        if values
    ]
    parts += [_table(name, value) for name, value in numbers.items()]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def histogram(values: Sequence[int]) -> str:
    """Return a histogram as SVG, with the minimum, middle and maximum below it."""
    low, high = min(values), max(values)
    width = max(1, high - low) / _BINS
    counts = [0] * _BINS
    for value in values:
        counts[min(_BINS - 1, int((value - low) / width))] += 1
    most, step = max(counts), _WIDTH / _BINS
    bars = "".join(
        f'<rect x="{number * step:.1f}" y="{_HEIGHT - _HEIGHT * count / most:.1f}" width="{step - 1:.1f}" '
        f'height="{_HEIGHT * count / most:.1f}"><title>{low + number * width:.0f} to {low + (number + 1) * width:.0f}: '
        f"{count}</title></rect>"
        for number, count in enumerate(counts)
    )
    marks = "".join(
        f'<text x="{x}" y="{_HEIGHT + 14}" text-anchor="{anchor}">{value:g}</text>'
        for x, anchor, value in ((0, "start", low), (_WIDTH / 2, "middle", (low + high) / 2), (_WIDTH, "end", high))
    )
    return f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT + 18}" width="{_WIDTH}" role="img">{bars}{marks}</svg>'


def _findings(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<p>Nothing is wrong with these rows.</p>"
    rows = "".join(
        f'<tr><td class="{finding.severity}">{finding.severity}</td><td><pre>{html.escape(finding.error.render())}</pre></td></tr>'
        for finding in findings
    )
    return f"<h2>Findings</h2><table>{rows}</table>"


def _table(name: str, value: Any) -> str:
    items = value.items() if isinstance(value, Mapping) else [("", value)]
    rows = "".join(
        f"<tr><td>{html.escape(str(key))}</td><td>{html.escape(str(entry))}</td></tr>" for key, entry in items
    )
    return f"<h2>{html.escape(name.replace('_', ' '))}</h2><table>{rows}</table>"
