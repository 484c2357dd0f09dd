"""Ways in which a run stands still, for tests of what is said about it. Each is installed in the run's own process."""

import functools
import re
import threading
import time
from collections.abc import Callable

from hone.generation import ENGINES
from hone.generation.native.engine import NativeEngine
from hone.insight import activity
from hone.rewards.scorers import SCORERS
from hone.rewards.scorers.base import register_scorer


def hold_the_interpreter() -> None:
    """A regular expression that takes for ever, and lets no other thread run."""
    re.match(r"(a+)+$", "a" * 80 + "b")


def take_a_lock_twice() -> None:
    """A lock that its owner waits for."""
    lock = threading.Lock()
    with lock, lock:
        pass


def in_step(number: int) -> bool:
    """Whether the run is in this step."""
    folder = activity.folder()
    return folder is not None and any(r.stage.startswith(f"step {number} ") for r in activity.read_records(folder))


def scorer(hang: Callable[[], None] | None, name: str) -> None:
    """Register ``name``: as digit_sequence, but it hangs in the third step."""

    @register_scorer(name)
    def compute(data_source: str, solution_str: str, ground_truth: object, extra_info: object = None) -> object:
        if hang is not None and in_step(3):
            hang()
        found = SCORERS.get("digit_sequence").compute
        return found(data_source, solution_str, ground_truth, extra_info)


class _HangingEngine(NativeEngine):
    """Waits for ever in the third step."""

    async def load_weights(self, weights, version, *, last=True):
        await super().load_weights(weights, version, last=last)
        if version == 2:
            wait_for_the_device()


def wait_for_the_device() -> None:
    """Sleep for an hour."""
    time.sleep(3600)


def engine(hangs: bool) -> None:
    """Register the engine ``shaky``."""
    ENGINES.register("shaky")(_HangingEngine if hangs else NativeEngine)


REGEX = functools.partial(scorer, hold_the_interpreter, "shaky")
LOCK = functools.partial(scorer, take_a_lock_twice, "shaky")
ENGINE = functools.partial(engine, True)
NO_SCORER_FAULT = functools.partial(scorer, None, "shaky")
NO_ENGINE_FAULT = functools.partial(engine, False)
