"""Ways in which a run stands still, for tests of what is said about it, installed in its own process; and what is done to it from outside."""

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from support import forked_engines

from hone.generation import ENGINES
from hone.generation.native.engine import NativeEngine
from hone.insight import activity
from hone.rewards.scorers import SCORERS
from hone.rewards.scorers.base import register_scorer

FULL, CLOCK = "full", "clock"
"""File that fills a disk, and file with the seconds by which the clock jumped."""


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


def jumping_clock(file: str, engines: bool) -> None:
    """Add the seconds in a file to this process's wall clock (``time.time``), and fork engines if there are any."""
    real = time.time

    def jumped() -> float:
        return real() + float(Path(file).read_text() or 0)

    time.time = jumped
    if engines:
        forked_engines.install()


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


# from outside ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """Mount a small file system at a folder; whether it could be."""
    folder.mkdir(parents=True)
    mounted = os.geteuid() == 0 and not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], capture_output=True
    ).returncode  # fmt: skip
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(disk: Path) -> None:
    """Leave no byte."""
    with (disk / FULL).open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"\0" * 2**16)


def strike(kind: str, pid: int, disk: Path, draw: random.Random, alive: Callable[[], bool]) -> bool:
    """Do one fault to a process that leads a group; return whether it happened."""
    if not alive():
        return False
    match kind:
        case "kill":
            (os.killpg if draw.random() < 0.5 else os.kill)(pid, signal.SIGKILL)
        case "child":
            found = forked_engines.engines_of(pid)
            if not found:
                return False
            draw.choice(found).kill()
        case "stop":
            os.killpg(pid, signal.SIGSTOP)
            time.sleep(0.2 + draw.random())
            os.killpg(pid, signal.SIGCONT)
        case "disk":
            fill(disk)
            for _ in range(100):  # until it ends or has tried to write
                time.sleep(0.1)
                if not alive():
                    break
            (disk / FULL).unlink()
        case "clock":
            (disk.parent / CLOCK).write_text(str(draw.randint(-86_400, 86_400)))
    return True
