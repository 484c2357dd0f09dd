"""Which threads of a process compute with all its cores: the one that says so, and no other.

torch divides an operation on the CPU over threads that belong to the thread that asked for it, a team. While there is one
team as large as the machine, its members wait for the next operation awake, and are there at once. As soon as another thread
(one that copies weights, saves a checkpoint or runs a user's tool) has a team of its own, there are more threads than cores,
and from then on all of them go to sleep after every operation: decoding, which is thousands of small operations, takes twice
as long until the process ends. So one thread computes, and to all others torch gives no team: what they compute, they compute
alone.
"""

from __future__ import annotations

import os
import threading


def compute_here(threads: int | None = None) -> None:
    """Let this thread compute with so many threads, and those that begin to use torch later on with themselves alone.

    Args:
        threads: None means as many as the process may use cores.
    """
    import torch

    torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    torch.get_num_threads()  # this thread has taken its number now, and keeps it when the number for others changes
    others = threading.Thread(target=torch.set_num_threads, args=(1,), name="no teams")
    others.start()
    others.join()
