"""Diagram of a step: which role computes what, in which pool of devices, from which columns; as Mermaid text or SVG.

It draws what :func:`hone.trainers.stages.data_flow` says, of a configuration or of a run's record.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from rich.filesize import decimal

COLOURS = {
    "rollout": "#d6e8fa",
    "actor": "#fbe3c4",
    "critic": "#f7d3d6",
    "reference": "#e3ddf5",
    "teacher": "#f5ddee",
    "reward_model": "#d4efdf",
}
"""Fill of a role's stages; those of others, which the controller computes, are grey."""
GREY = "#ececea"
ROW, BOX, LEFT, RIGHT, WIDTH = 58, (330, 240), 314, 586, 1010
"""Sizes in the SVG: height of a stage's row; left end and width of its box; ends of the columns at its sides; width of all."""


STYLE = "text{font:13px sans-serif;fill:#1c1c1a}.name{font-weight:600}.note{font-size:11px;fill:#62625e}.column{font:12px monospace}"


def mermaid(flow: Mapping[str, Any]) -> str:
    """Return a step as a Mermaid flowchart: an arrow a column, from the stage that adds it to each that needs it."""
    stages, makers = flow["stages"], dict[str, int]()
    lines = ["flowchart TD"]
    for number, stage in enumerate(stages):
        lines.append(f'  s{number}["<b>{_safe(stage["name"])}</b><br/>{_safe(_place(flow, stage["role"]))}"]')
        lines.append(f"  style s{number} fill:{COLOURS.get(stage['role'], GREY)},stroke:#555,color:#111")
    joined: set[tuple[int, int]] = set()
    for number, stage in enumerate(stages):
        edges: dict[int, list[str]] = {}
        for column in stage["needs"]:
            if column in makers:
                edges.setdefault(makers[column], []).append(_sized(flow, column))
        for maker, columns in edges.items():
            joined.add((maker, number))
            lines.append(f'  s{maker} -->|"{_safe(", ".join(columns))}"| s{number}')
        makers |= dict.fromkeys(stage["adds"], number)
    lines += [f"  s{one} -.-> s{other}" for one, other in pairwise(range(len(stages))) if (one, other) not in joined]
    if len(stages) > 1:
        lines.append(f'  s{len(stages) - 1} -.->|"weights of the next step"| s0')
    return "\n".join(lines) + "\n"


def svg(flow: Mapping[str, Any]) -> str:
    """Return a step as an SVG picture: a row a stage, with the columns that it reads at its left and adds at its right."""
    stages, top = flow["stages"], 70 + 16 * len(flow["pools"])
    below = top + ROW * len(stages)
    rows = (part for row, stage in enumerate(stages) for part in _stage(flow, stage, top + ROW * row))
    body = "".join(
        [
            *_heading(flow, top),
            *rows,
            _text(BOX[0] + BOX[1] / 2, below + 10, "the weights of the next step", "middle", "note"),
        ]
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {below + 30}" width="{WIDTH}" height="{below + 30}" role="img">'
        f"<title>data flow of a training step</title><style>{STYLE}</style>"
        f'<rect width="100%" height="100%" fill="#fdfdfc"/>{body}</svg>\n'
    )


def _heading(flow: Mapping[str, Any], top: float) -> Iterator[str]:
    step = f"a step: {flow['sequences']:,} sequences, at most {flow['tokens']:,} response tokens"
    step += f"; weights of up to {flow['staleness']} steps before" if flow["staleness"] else ""
    yield _text(20, 24, step, "start", "name")
    for number, pool in enumerate(flow["pools"]):
        many = f"{pool['processes']} process{'es' * (pool['processes'] != 1)}"
        text = f"pool {pool['name']}, {many}: {', '.join(pool['roles'])}"
        yield _text(20, 44 + 16 * number, text, "start", "note")
    yield _text(LEFT, top - 10, "needs", "end", "note") + _text(RIGHT, top - 10, "adds, bytes at most", "start", "note")


def _stage(flow: Mapping[str, Any], stage: Mapping[str, Any], top: float) -> Iterator[str]:
    left, width = BOX
    middle, height = left + width / 2, 38
    yield (
        f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="6" fill="{COLOURS.get(stage["role"], GREY)}" '
        f'stroke="#8a8a84"/>{_text(middle, top + 16, stage["name"], "middle", "name")}'
        f"{_text(middle, top + 31, _place(flow, stage['role']), 'middle', 'note')}"
        f'<path d="M{middle} {top + height}v{ROW - height - 5}m-4 -6l4 6l4 -6" fill="none" stroke="#8a8a84"/>'
    )
    for columns, x, anchor in ((stage["needs"], LEFT, "end"), (stage["adds"], RIGHT, "start")):
        shown = [_sized(flow, column) if anchor == "start" else column for column in columns]
        lines = [", ".join(shown[start : start + 2]) for start in range(0, len(shown), 2)]
        for number, line in enumerate(lines):
            yield _text(x, top + 24 + 14 * (number - (len(lines) - 1) / 2), line, anchor, "column")


def _place(flow: Mapping[str, Any], role: str) -> str:
    """Return a role with its pool and processes; stages without a model run in the controller's worker."""
    for pool in flow["pools"]:
        if role in pool["roles"]:
            return f"{role} in pool {pool['name']}" if len(flow["pools"]) > 1 else role
    return "controller" if role == "work" else role


def _sized(flow: Mapping[str, Any], column: str) -> str:
    size = flow["bytes"].get(column)
    return column if size is None else f"{column} {decimal(size)}"


def _text(x: float, y: float, text: str, anchor: str, kind: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{html.escape(str(text))}</text>'


def _safe(text: str) -> str:
    """Return text without what ends a label of Mermaid; names come from configurations of other people."""
    return re.sub(r"[^\w .,:()/=-]", "?", str(text))
