"""Facts about this machine: cores, memory, limits, disk, GPUs and the processes on them."""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from hone.insight.environment import usable_memory
from hone.threads import omp_threads

GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class GpuUser:
    """A process that holds memory of a GPU."""

    gpu: int
    pid: int
    name: str
    gib: float


@dataclass(frozen=True)
class Gpu:
    """A GPU as reported by nvidia-smi, memory in GiB."""

    index: int
    name: str
    total_gib: float
    used_gib: float


@dataclass(frozen=True)
class Machine:
    """Facts about the machine, sizes in bytes."""

    cpus: int
    affinity: int  # cores that this process may run on
    quota: float | None  # cores that the container's CPU quota allows (may be a fraction); None without a quota
    memory: int  # memory that a process may use: that of the machine, or the container's limit if smaller
    shared_memory: int | None  # size of /dev/shm; None when it does not exist
    open_files: int  # soft limit of open files
    gpus: tuple[Gpu, ...] = ()  # GPUs that nvidia-smi reports
    gpu_users: tuple[GpuUser, ...] = field(default=())  # processes on the GPUs
    omp_threads: int | None = None  # value of ``OMP_NUM_THREADS``; None if unset

    @property
    def usable_cpus(self) -> int:
        """Cores that threads of this process can really use."""
        return max(1, min(self.affinity, math.ceil(self.quota) if self.quota else self.affinity))


def look() -> Machine:
    """Return the facts of this machine; takes a few milliseconds, longer where there are GPUs."""
    return Machine(
        cpus=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=cpu_quota(),
        memory=usable_memory(),
        shared_memory=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        gpus=tuple(_gpus()),
        gpu_users=tuple(_gpu_users()),
        omp_threads=omp_threads(),
    )


def cpu_quota(root: Path = _CGROUP) -> float | None:
    """Return the cores that the control group at ``root`` allows (version 2 or 1); None without a limit."""
    try:
        quota, _, period = (root / "cpu.max").read_text().partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass  # version 1, or no limit
    quota, period = (_number(root / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota / period if quota and period and quota > 0 else None


def bfloat16_cost() -> float:
    """Measure the time of a bfloat16 matmul on one core of this CPU, as a multiple of a float32 one; takes 0.1 s."""
    import torch

    kinds = (torch.float32, torch.bfloat16)
    operands = {dtype: [torch.ones(rows, 256, dtype=dtype) for rows in (64, 512)] for dtype in kinds}
    shortest = dict.fromkeys(kinds, math.inf)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other when the machine is busy
    try:
        for dtype in kinds * 20:  # alternate, and keep the shortest: other load only lengthens a measurement
            started = time.perf_counter()
            torch.nn.functional.linear(*operands[dtype])
            shortest[dtype] = min(shortest[dtype], time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return shortest[torch.bfloat16] / shortest[torch.float32]


def free_disk(path: Path) -> tuple[Path, int]:
    """Return the nearest existing parent directory of ``path``, and the free bytes there."""
    absolute = path.expanduser().absolute()
    existing = next(folder for folder in (absolute, *absolute.parents) if folder.is_dir())
    return existing, shutil.disk_usage(existing).free


def write_problem(path: Path) -> str:
    """Return why no folder can be made in the nearest existing parent of ``path``; empty if one was made, and removed."""
    absolute = path.expanduser().absolute()
    existing = next(parent for parent in (absolute, *absolute.parents) if parent.exists())
    try:
        with tempfile.TemporaryDirectory(prefix=".hone-can-write-here", dir=existing):
            return ""
    except OSError as problem:  # only a try tells for /proc, or for root on a read-only disk
        return f"no folder can be made in {existing} ({problem.strerror})"


def port_is_free(port: int) -> bool:
    """Return whether a server could listen on a port of the loopback interface."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _number(file: Path) -> float | None:
    try:
        return float(file.read_text())
    except (OSError, ValueError):  # missing, or "max"
        return None


def _gpus() -> list[Gpu]:
    rows = _nvidia_smi("--query-gpu=index,name,memory.total,memory.used")
    return [Gpu(int(i), name, float(total) / 1024, float(used) / 1024) for i, name, total, used in rows]


def _gpu_users() -> list[GpuUser]:
    order = {uuid: int(index) for index, uuid in _nvidia_smi("--query-gpu=index,uuid")}
    rows = _nvidia_smi("--query-compute-apps=gpu_uuid,pid,process_name,used_memory")
    return [
        GpuUser(order.get(uuid, -1), int(pid), name, float(used) / 1024 if used.isdigit() else 0.0)
        for uuid, pid, name, used in rows
        if int(pid) != os.getpid()
    ]


def _nvidia_smi(query: str) -> list[list[str]]:
    """Return the rows of a query; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
