"""Terminal output: a live progress line; in a notebook a live line with a curve; elsewhere one plain line per step."""

from __future__ import annotations

import html
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.text import Text

from hone.insight import activity
from hone.insight.curves import svg_curve
from hone.insight.trackers.base import TRACKERS, RunInfo, Tracker
from hone.progress import LINE_SECONDS, Bar, Lines, Saying

_SECONDS = 0.5  # shortest time between two updates, so that fast steps do not flood the notebook


def current_work(folder: Path) -> str | None:
    """Return what a run is doing, from the records of its processes; None between two steps or without a record.

    An example: ``step 3 > update_actor for 1:05, actor[0]: micro-batch 12 of 64``.
    """
    records = activity.read_records(folder)
    driver = next((record for record in records if record.role == "driver" and record.spans), None)
    if driver is None:
        return None
    counts = [
        ("" if record is driver else f"{record.name}: ") + f"micro-batch {record.done + 1} of {record.total}"
        for record in records
        if record.done < record.total
    ]
    spans = [span for span in driver.spans if not span.waits]
    since = spans[-1].since if spans else driver.spans[-1].since
    return ", ".join([f"{driver.stage} for {clock(time.time() - since)}", *counts[:2]])


class SignsOfLife:
    """Thread that shows what a run does once it has been silent for half a minute."""

    def __init__(
        self, folder: Path, show: Callable[[str], None], *, every: float = LINE_SECONDS, silence: float = 30.0
    ) -> None:
        self._folder, self._show, self._every, self._silence = folder, show, every, silence
        self._heard, self._ended = time.monotonic(), threading.Event()
        self._bar: Bar | None = None
        threading.Thread(target=self._watch, name="signs of life", daemon=True).start()

    def heard(self, bar: Bar | None = None) -> None:
        """Begin a new silence, once ``bar`` has ended."""
        self._heard, self._bar = time.monotonic(), bar or self._bar

    def due(self) -> str | None:
        """Return what is to be shown now, if anything is."""
        other = self._bar is not None and not self._bar.ended
        silent = not other and time.monotonic() - self._heard >= self._silence
        return current_work(self._folder) if silent else None

    def _watch(self) -> None:
        while not self._ended.wait(self._every):
            if text := self.due():
                self._show(text)

    def close(self) -> None:
        self._ended.set()


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
        """Show a step. ``metric``: metric of the curve, if no earlier step has one."""
        self._line, self._metric = line, self._metric or metric
        if self._metric is not None and self._metric in metrics:
            self._curve.append((step, metrics[self._metric]))
        if time.monotonic() - self._shown >= _SECONDS:
            self._update()

    def say(self, line: str) -> None:
        """Show a text below which the curve stays."""
        self._line = line
        if time.monotonic() - self._shown >= _SECONDS:
            self._update()

    def finish(self, line: str) -> None:
        self._line = line
        self._update()

    def _update(self) -> None:
        self._shown = time.monotonic()
        self._handle.update(self._content(), raw=True)

    def _content(self) -> dict[str, str]:
        curve = svg_curve(self._curve, title=self._metric or "") if len(self._curve) > 1 else ""
        return {"text/plain": self._line, "text/html": f"<pre>{html.escape(self._line)}</pre>{curve}"}


_FIELDS = (
    ("reward", ("critic/rewards/mean",), ".3f"),
    ("loss", ("train/loss",), ".4f"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"), ".2e"),
    ("length", ("response_length/mean",), ".0f"),
    ("entropy", ("actor/entropy",), ".2f"),
    ("lr", ("train/lr",), ".1e"),
    ("accuracy", ("rewards/accuracies",), ".3f"),
    ("tokens/s", ("perf/throughput",), ",.0f"),
)
"""Label, candidate metrics (the first existing one is shown), format."""
_OF_VALIDATION = (
    ("val loss", ("val/loss",), ".4f"),
    ("val accuracy", ("val/rewards/accuracies",), ".3f"),
)
"""The same, shown only with the step that was validated."""

_WIDE = 110  # smallest number of columns for a progress bar

_PACE_WINDOW = 20  # number of steps that the ETA is computed from


@TRACKERS.register("console")
class ConsoleTracker(Tracker):
    """Show step, reward, KL, length, tokens/s and ETA; validation results remain as lines above. ``console``: output;
    None means standard output.
    """

    def __init__(self, info: RunInfo, console: Console | None = None) -> None:
        self._total, self._first = info.total_steps, info.first_step
        self._console = console or Console()
        self._times: deque[tuple[int, float]] = deque(maxlen=_PACE_WINDOW)
        self._shown: dict[str, str] = {}
        self._validated = (0, "")  # newest validated step, and what it gave
        self._progress: Progress | None = None
        self._notebook = NotebookDisplay() if self._console.is_jupyter else None
        if self._console.is_terminal and self._notebook is None:
            bar: list[ProgressColumn] = [BarColumn(bar_width=16)] if self._console.width >= _WIDE else []
            self._progress = Progress(
                SpinnerColumn(),
                *bar,
                TextColumn("{task.fields[summary]}", markup=False),
                console=self._console,
                refresh_per_second=4,
                transient=True,
            )
            self._task = self._progress.add_task("", total=self._total, summary="starting")
            self._progress.start()
        self._signs = SignsOfLife(info.run_dir.path / activity.FOLDER, self._show_work)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if not self._times or step > self._times[-1][0]:
            self._times.append((step, time.monotonic()))
        self._signs.heard()
        summary = summarise(metrics)
        self._shown.update(summary)
        fields = [f"{label} {value}" for label, value in self._shown.items()]
        head, eta = f"step {step}/{self._total}", f"ETA {self._eta(step)}"
        validation = [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("val-core/")]
        validation += [f"{label} {value}" for label, value in summarise(metrics, _OF_VALIDATION).items()]
        if validation:
            self._validated = (step, "  ".join(validation))
        if self._progress is not None:
            room = self._console.width - (22 if self._console.width >= _WIDE else 4)
            self._progress.update(self._task, completed=step, summary=fit([head, eta, *fields], room))
            if validation:
                self._progress.print(Text.assemble((head, "bold"), "  ", self._validated[1]), highlight=False)
        elif self._notebook is not None:
            line = "  ".join([head, eta, *fields, *validation])
            self._notebook.show(line, step, metrics, main_metric(metrics))
        else:
            self._line("  ".join([head, *(fields if summary else []), *validation, eta]))

    def progress(self, what: str, total: int) -> Bar:
        live = self._progress is not None or self._notebook is not None
        bar = Saying(what, total, self._say) if live else Lines(what, total, self._console.file)
        self._signs.heard(bar)
        return bar

    def _show_work(self, text: str) -> None:
        if self._progress is not None or self._notebook is not None:
            self._say(text)
        else:
            self._line(text)
            self._signs.heard()

    def _say(self, text: str) -> None:
        if self._progress is not None:
            self._progress.update(self._task, summary=text)
        elif self._notebook is not None:
            self._notebook.say(text)

    def finish(self, status: str) -> None:
        self._signs.close()
        if self._progress is not None:
            self._progress.stop()
        last = self._times[-1][0] if self._times else self._first
        fields = [f"{label} {value}" for label, value in self._shown.items()]
        of_last = [self._validated[1]] if self._validated[0] == last and last else []
        end = "  ".join([f"{status} at step {last}/{self._total}", *fields, *of_last])
        if self._notebook is not None:
            self._notebook.finish(end)
        else:
            self._line(end)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _eta(self, step: int) -> str:
        (first, begun), (last, now) = self._times[0], self._times[-1]
        if last <= first:
            return "-:--"
        return clock((self._total - step) * (now - begun) / (last - first))


def summarise(
    metrics: Mapping[str, float], fields: Sequence[tuple[str, Sequence[str], str]] = _FIELDS
) -> dict[str, str]:
    """Return the main numbers for the progress line, by label.

    >>> summarise({"critic/rewards/mean": 0.5, "perf/throughput": 1234.5, "actor/lr": 1e-6})
    {'reward': '0.500', 'tokens/s': '1,234'}
    """
    texts = {}
    for label, names, style in fields:
        name = next((name for name in names if name in metrics), None)
        if name is not None:
            texts[label] = format(metrics[name], style)
    return texts


def main_metric(metrics: Mapping[str, float]) -> str | None:
    return next((name for _, names, _ in _FIELDS for name in names if name in metrics), None)


def fit(fields: Sequence[str], width: int) -> str:
    """Join as many of the first fields, two spaces between them, as fit into ``width`` columns; always the first.

    >>> fit(["step 1/9", "ETA 0:30", "reward 0.5"], 20)
    'step 1/9  ETA 0:30'
    """
    line = fields[0]
    for field in fields[1:]:
        if len(line) + 2 + len(field) > width:
            break
        line += f"  {field}"
    return line


def clock(seconds: float) -> str:
    """Format seconds as ``m:ss`` or ``h:mm:ss``.

    >>> clock(75), clock(3671)
    ('1:15', '1:01:11')
    """
    whole = max(0, math.ceil(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
