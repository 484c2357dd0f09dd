"""Profile of the updates of chosen steps by torch.profiler.

<run>/profile/step_<N>.<process>.json.gz          Chrome trace, for Perfetto
<run>/profile/step_<N>.<process>.txt              operators with the most time
<run>/profile/step_<N>.<process>.memory.pickle    on CUDA: allocations, for https://pytorch.org/memory_viz
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hone.config.run import RunConfig
from hone.insight.run_files import disk_errors, write_atomically

FOLDER = "profile"
_OPERATORS = 40
_ALLOCATIONS = 200_000  # newest events of the allocator that a snapshot holds


@contextlib.contextmanager
def profiled_update(trainer: RunConfig, step: int, process: str, device: torch.device) -> Iterator[None]:
    """Profile the body if ``trainer.profile_steps`` names the step; it computes the same numbers.

    ``process``: name of the model and the rank, such as ``actor-0``.

    Raises HoneError: the files cannot be written.
    """
    if step not in trainer.profile_steps:
        yield
        return
    on_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
    try:
        with profile(activities=activities, record_shapes=True, profile_memory=True) as profiler:
            yield
        _write(profiler, Path(trainer.default_local_dir) / FOLDER, f"step_{step}.{process}", on_cuda)
    finally:
        if on_cuda:
            torch.cuda.memory._record_memory_history(enabled=None)


def _write(profiler: profile, folder: Path, name: str, on_cuda: bool) -> None:
    operators = profiler.key_averages().table(
        sort_by="self_cuda_time_total" if on_cuda else "self_cpu_time_total", row_limit=_OPERATORS
    )
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"{name}.json.gz"))
        write_atomically(folder / f"{name}.txt", operators + "\n")
        if on_cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"{name}.memory.pickle"))
