"""Describe the environment of a run for ``run.json``: versions, hardware and the state of the working copy."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "numpy")


def versions() -> dict[str, str]:
    """Return the versions of Python, Hone and the installed packages that influence the numbers."""
    from hone import __version__

    versions_by_name = {"python": platform.python_version(), "hone": __version__}
    for package in _PACKAGES:
        try:
            versions_by_name[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions_by_name


def hardware() -> dict[str, Any]:
    """Return CPU model, cores (of the machine, and usable by this process), memory in GB, and the CUDA GPUs."""
    import psutil
    import torch

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append({"name": properties.name, "memory_gb": round(properties.total_memory / 2**30, 1)})
    return {
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
    }


def usable_memory(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that a process may use: the machine's memory, or the container's limit (version 2 or 1) if smaller."""
    import psutil

    total = psutil.virtual_memory().total
    for file in (cgroup / "memory.max", cgroup / "memory/memory.limit_in_bytes"):
        try:
            return min(total, int(file.read_text()))
        except (OSError, ValueError):  # missing, or "max"
            continue
    return total


def oom_kills() -> int:
    """Return the number of processes that the kernel killed for memory since boot; 0 if it does not report it."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def cpu_model() -> str:
    """Return the name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return commit, branch and whether tracked files are changed, of the working copy around ``folder``; None without one."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "branch": _git(folder, "rev-parse", "--abbrev-ref", "HEAD"), "dirty": bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(  # noqa: S603 - fixed arguments
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # no git, or a working copy on a hanging file system
        return None
    return process.stdout.strip() if process.returncode == 0 else None
