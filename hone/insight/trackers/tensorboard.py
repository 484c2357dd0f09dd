"""TensorBoard event files in ``<run>/tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping

from hone.insight.trackers.base import TRACKERS, RunInfo, require


@TRACKERS.register("tensorboard")
class TensorBoardTracker:
    """Write scalars, and the config as text. After a resume, TensorBoard hides values after the checkpoint."""

    def __init__(self, info: RunInfo) -> None:
        require("tensorboard", tracker="tensorboard")
        from torch.utils.tensorboard import SummaryWriter

        last = info.run_dir.last_step
        self._writer = SummaryWriter(
            log_dir=str(info.run_dir.path / "tensorboard"), purge_step=None if last is None else last + 1
        )
        if last is None:
            self._writer.add_text("config", "\n".join(f"    {line}" for line in _dump(info).splitlines()), 0)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def finish(self, status: str) -> None:
        """Flush and close."""
        del status
        self._writer.close()


def _dump(info: RunInfo) -> str:
    import yaml

    return yaml.safe_dump(info.config(), sort_keys=False, allow_unicode=True)
