"""Progress of a run in a Jupyter notebook: one output that each step replaces, with the line and a curve."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping

from hone.insight.curves import svg_curve

_SECONDS = 0.5
"""Shortest time between two updates, so that fast steps do not flood the notebook."""


class NotebookDisplay:
    """Output of a notebook cell with the newest line and the curve of one metric."""

    def __init__(self) -> None:
        from IPython.display import DisplayHandle  # pyright: ignore[reportMissingImports]

        self._metric: str | None = None
        self._curve: list[tuple[float, float]] = []
        self._shown, self._line = 0.0, "starting"
        self._handle = DisplayHandle()
        self._handle.display(self._content(), raw=True)

    def show(self, line: str, step: int, metrics: Mapping[str, float], metric: str | None) -> None:
        """Show a step.

        Args:
            line: text of the step.
            step: number of the step.
            metrics: metrics of the step.
            metric: metric of the curve, if no earlier step has one.
        """
        self._line, self._metric = line, self._metric or metric
        if self._metric is not None and self._metric in metrics:
            self._curve.append((step, metrics[self._metric]))
        if time.monotonic() - self._shown >= _SECONDS:
            self._update()

    def finish(self, line: str) -> None:
        """Show the last line with the whole curve."""
        self._line = line
        self._update()

    def _update(self) -> None:
        self._shown = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        curve = svg_curve(self._curve, title=self._metric or "") if len(self._curve) > 1 else ""
        return {"text/plain": self._line, "text/html": f"<pre>{html.escape(self._line)}</pre>{curve}"}
