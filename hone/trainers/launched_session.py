"""Session of a launched run: the first rank has the run's session, and what it decides, all ranks do."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hone.cluster.failures import rank_lost
from hone.cluster.supervisor import Supervisor
from hone.cluster.torchrun.exchange import FailedElsewhere, joined_ranks
from hone.cluster.torchrun.ranks import POOL, let_first_speak
from hone.cluster.watchdog import Hang
from hone.config.trees import OfflineConfig
from hone.insight import activity
from hone.trainers.session import RunSession
from hone.training.checkpoints.checkpoint import Checkpoint


class LaunchedSession:
    """Session of one launched run, on each of its ranks. Methods with an answer are collective.

    Attributes:
        resumed_from: checkpoint from which the run resumes, or None.
    """

    def __init__(self, config: OfflineConfig, on_hang: Callable[[Hang], bool]) -> None:
        run = Path(config.trainer.default_local_dir)
        self._ranks = joined_ranks()
        self._own: RunSession | None = None
        self._writing: threading.Thread | None = None
        self._ranks.lost = lambda: rank_lost(run, config)

        def begin() -> str | None:
            self._own = RunSession(config, on_hang=on_hang)
            return str(self._own.resumed_from) if self._own.resumed_from else None

        resumed = self._ranks.decided(begin)
        if self._own is not None:
            self.resumed_from = self._own.resumed_from
        else:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)  # the first rank saves with the help of all
            activity.begin(run / activity.FOLDER, POOL, self._ranks.launched.rank)
            self.resumed_from = Checkpoint.open(resumed) if resumed else None

    @contextlib.contextmanager
    def running(self, total_steps: int, steps_per_epoch: int) -> Iterator[None]:
        """Start the run, and record its end."""
        if self._own is not None:
            with self._own.running(total_steps, steps_per_epoch):
                yield
            return
        try:
            yield
            self._wait()
        finally:
            activity.end()

    def require_steps(self, total_steps: int) -> None:
        """Raise AlreadyComplete if no step is left; the first rank warns of changed keys."""
        self._decided(lambda session: session.require_steps(total_steps))

    @property
    def stop_requested(self) -> bool:
        """True once somebody asked the first rank to stop."""
        return self._decided(lambda session: session.stop_requested)

    @property
    def last_save_due(self) -> bool:
        """True if the loop must save its last step after a stop request."""
        return self._decided(lambda session: session.last_save_due)

    @property
    def exit_code(self) -> int:
        """Exit code of the run."""
        return self._decided(lambda session: session.exit_code)

    def due(self, frequency: int | str, step: int) -> bool:
        """Return whether an activity is due after ``step``."""
        return self._decided(lambda session: session.due(frequency, step))

    def save_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after ``step``."""
        return self._decided(lambda session: session.save_due(step))

    def begin_save(self, step: int) -> str | None:
        """Return where to write checkpoint ``step``, or None if it exists; wait for the previous save."""
        self._wait()
        return self._decided(lambda session: session.begin_save(step))

    def finish_save(self, step: int, state: dict[str, Any], write: Callable[[], object]) -> None:
        """Publish checkpoint ``step`` once ``write()`` has filled its directory on all ranks, in the background."""
        if self._own is not None:
            self._own.finish_save(step, state, write)
            return

        def end() -> None:
            with contextlib.suppress(FailedElsewhere):  # the first rank ends the run for it
                write()

        self._writing = threading.Thread(target=end, name="checkpoint")
        self._writing.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log the metrics of the first rank."""
        if self._own is not None:
            self._own.log(step, metrics)

    def completed(self, step: int, memory: dict[str, dict[str, float]]) -> None:
        """Record the last step and the reason of the end."""
        if self._own is not None:
            self._own.completed(step, memory)

    def shared(self, make: Callable[[], Any]) -> Any:
        """Return what the first rank makes, a value of JSON or a batch."""
        return self._ranks.decided(make)

    def _decided(self, decide: Callable[[RunSession], Any]) -> Any:
        return self._ranks.decided(lambda: decide(self._own) if self._own is not None else None)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join()
            self._writing = None


def followed(run: Callable[[Supervisor], int]) -> int:
    """Run the program on a rank other than the first, which leaves messages to the first; return the exit code."""
    logging.getLogger("hone").setLevel(logging.ERROR)
    supervisor = Supervisor(Path(), 0)
    try:
        return run(supervisor)
    except FailedElsewhere:
        let_first_speak()
        return 1
    except Exception:
        let_first_speak()
        raise
    finally:
        supervisor.close()
