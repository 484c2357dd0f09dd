"""A run as a Python object: metrics, samples, curves, model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hone.errors import CheckpointError


class Run:
    """A run in its directory, finished or not.

    Args:
        path: run directory.

    Raises:
        HoneError: the directory holds no run.
    """

    def __init__(self, path: str | Path) -> None:
        from hone.insight.run_directory import read_run

        self.path = Path(path).expanduser()
        read_run(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.status}, {len(self.metrics)} steps)"

    @property
    def record(self) -> dict[str, Any]:
        """``run.json``: versions, hardware, seed, command, status, downloads."""
        from hone.insight.run_directory import read_run

        return read_run(self.path)

    @property
    def status(self) -> str:
        """finished, interrupted, failed, running, or dead."""
        from hone.apps.lab.compare import read_whole_run

        return read_whole_run(self.path).status

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One dictionary per step, with ``step``."""
        from hone.insight.run_directory import read_metrics

        return read_metrics(self.path)

    @property
    def model_path(self) -> str:
        """Directory of the newest checkpoint's model.

        Raises:
            CheckpointError: the run has no checkpoint.
        """
        from hone.training.export import find_actor

        if not any((self.path / "checkpoints").glob("step_*")):
            raise CheckpointError(
                "the run has no checkpoint", where=str(self.path), fix="save_freq=-1 saves one at the end"
            )
        return str(find_actor(self.path))

    def samples(
        self,
        step: int | None = None,
        *,
        worst: int | None = None,
        best: int | None = None,
        contains: str | None = None,
        limit: int = 5,
        validation: bool = False,
    ) -> list[dict[str, Any]]:
        """Return samples of a step with their reward terms.

        Args:
            step: step with samples; None means the newest.
            worst: number of samples with the lowest scores.
            best: number of samples with the highest scores.
            contains: text that prompt or response must contain.
            limit: without ``worst`` and ``best``: most samples, spread over the step.
            validation: read validation samples instead of rollouts.

        Raises:
            HoneError: there are no samples of that step.
        """
        from hone.apps.lab.samples import SampleQuery, read_samples

        folder = self.path / ("validation" if validation else "rollouts")
        return read_samples(folder, SampleQuery(step, worst, best, contains, None, limit)).shown

    def coverage(self) -> dict[str, Any]:
        """Return the fate of every drawn prompt, as `hone runs coverage --json` prints it.

        The keys are ``step``, ``counts``, ``by_epoch``, ``lags``, ``reasons``, ``never_trained``, ``bias``, and ``problem``:
        None, or the first contradiction of the record.

        Raises:
            HoneError: the run has no such record, or a line of it is damaged.
        """
        from hone.apps.lab.coverage import coverage_report
        from hone.insight.coverage import read_coverage

        return coverage_report(read_coverage(self.path))

    def plot(self, *metrics: str, file: str | Path | None = None) -> Path:
        """Draw curves into a PNG, and show it in a notebook.

        Args:
            metrics: names; without any, those that matter most.
            file: file to write; None means ``curves.png`` in the run directory.

        Raises:
            HoneError: a metric is unknown, or the run has none yet.
        """
        from hone.apps.lab.compare import headline_metrics, read_whole_run, require_metrics
        from hone.errors import HoneError
        from hone.insight.curves import draw_png, points

        run = read_whole_run(self.path)
        names = require_metrics(list(metrics), [run]) or headline_metrics([run])
        curves = {name: {run.name: points(run.metrics, name)} for name in names}
        if not any(curve for by_run in curves.values() for curve in by_run.values()):
            raise HoneError("the run has no metrics to draw", where=str(self.path), fix="train at least one step")
        target = Path(file) if file is not None else self.path / "curves.png"
        draw_png(target, curves)
        _show_in_notebook(target)
        return target


def model_directory(model: str | Path | Run | None) -> str | None:
    """Return the path or hub name of a model; for a run, the directory of its newest checkpoint's model."""
    if model is None:
        return None
    return model.model_path if isinstance(model, Run) else str(model)


def _show_in_notebook(picture: Path) -> None:
    import sys

    shell = sys.modules.get("IPython")
    if shell is not None and shell.get_ipython() is not None:
        from IPython.display import Image, display  # pyright: ignore[reportMissingImports]

        display(Image(filename=str(picture)))
