"""Restriction of torch's CPU parallelism to one thread of a process.

torch runs a CPU operation on a team of threads that belongs to the calling thread. With a single team as large as the machine,
its threads spin between operations and start at once. When another thread (which copies weights, saves a checkpoint or runs a
user's tool) gets a team, there are more threads than cores. From then on all of them sleep after every operation, and decoding,
which is thousands of small operations, takes twice as long until the process ends. Therefore only one thread gets a team, and
all other threads compute alone.

By default GNU OpenMP spins for milliseconds. Where other programs use the cores, the team then burns the time slices in which its
missing thread could run: next to two busy processes on two cores a model of 135 million weights generated 11 to 20 tokens a second,
and 30 to 34 with a spin of about a tenth of a millisecond. Alone, both generated 114 to 130.
"""

from __future__ import annotations

import os
import threading

SPIN = "5000"
"""Iterations for which a thread of a team spins before it sleeps (libgomp's own default: 300,000)."""


def spin_briefly() -> None:
    """Let teams spin for :data:`SPIN` iterations, unless the user has set how they wait; without effect once torch is loaded."""
    if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
        os.environ["GOMP_SPINCOUNT"] = SPIN


def compute_here(threads: int | None = None) -> None:
    """Give this thread a team of ``threads``, and other threads that use torch later no team.

    Args:
        threads: size of the team; None means ``OMP_NUM_THREADS`` if it is set, else the cores that the process may use.
    """
    import torch

    torch.set_num_threads(threads or omp_threads() or len(os.sched_getaffinity(0)))
    torch.get_num_threads()  # fixes the number of this thread, before that of others changes
    others = threading.Thread(target=torch.set_num_threads, args=(1,), name="no teams")
    others.start()
    others.join()


def divided(cores: int, engines: int, each: int | None = None, training: int | None = None) -> tuple[int, int]:
    """Return the threads of each engine, and of training in the same run, where both compute at the same time.

    Args:
        cores: cores of the machine.
        engines: number of engines.
        each: configured threads of an engine; None lets all engines share half of the cores.
        training: configured threads of training; None takes the other cores.
    """
    each = each or max(1, cores // (2 * engines))
    return each, training or max(1, cores - each * engines)


def omp_threads() -> int | None:
    """Return the number of threads in ``OMP_NUM_THREADS``; None if it is unset or not a positive number."""
    value = os.environ.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None
