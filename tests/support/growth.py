"""How the time of some work grows with its size: judged by ratios, which are the same on a slow or a busy machine."""

import time
from collections.abc import Callable


def grows_linearly(work: Callable[[int], object], size: int) -> bool:
    """Return whether work of ``size`` takes much less than a hundred times the processor's seconds of a tenth of it, once in three times."""
    return any(_seconds(work, size) < 30 * max(_seconds(work, size // 10), 0.002) for _ in range(3))


def _seconds(work: Callable[[int], object], size: int) -> float:
    begun = time.process_time()
    work(size)
    return time.process_time() - begun
