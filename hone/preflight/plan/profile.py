"""A small measured profile of this machine: how fast it multiplies, moves memory and starts an operation.

It takes about a second and is kept in a file, for a processor, its number of cores and a version of torch.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hone.preflight.machine import Machine
from hone.preflight.plan.devices import Device
from hone.threads import compute_here

_ROWS, _INNER, _COLUMNS = 1024, 512, 1536
_ATTEMPTS = 5
_COPIED = 64 * 2**20
_SMALL_OPERATIONS = 2000
_GPU = {"rows": 8192, "inner": 4096, "columns": 4096}
_IMPORTS = "import hone.trainers.rl, hone.rewards.pool, psutil; print(psutil.Process().memory_info().rss)"
_NETWORK = 1.2e9


def this_device(machine: Machine, *, on_cpu: bool, again: bool = False) -> Device:
    """The device of this machine as measured, from the file when it was measured before.

    Args:
        machine: what it has.
        on_cpu: whether its CPUs are meant, or its first GPU.
        again: measure anew.
    """
    import torch

    kind = _processor() if on_cpu else torch.cuda.get_device_name()
    key = f"{kind} x{machine.usable_cpus if on_cpu else 1} torch {torch.__version__}"
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "devices.json"
    known = _read(file)
    if again or key not in known:
        known[key] = dataclasses.asdict(_measured(kind, on_cpu, machine))
        file.parent.mkdir(parents=True, exist_ok=True)
        beside = file.with_suffix(f".{os.getpid()}.tmp")
        beside.write_text(json.dumps(known, indent=1))
        beside.replace(file)
    memory = machine.memory if on_cpu else min(gpu.total_gib for gpu in machine.gpus) * 2**30
    return dataclasses.replace(Device(**known[key]), memory=memory)


def shared(device: Device, processes: int) -> Device:
    """A part of a CPU: what one of several processes on the machine gets."""
    if not device.on_cpu or processes == 1:
        return device
    rates = {name: getattr(device, name) / processes for name in ("memory", "wide_rate", "narrow_rate", "bandwidth")}
    return dataclasses.replace(device, **rates)


def _measured(name: str, on_cpu: bool, machine: Machine) -> Device:
    import torch

    from hone.generation.products import fast_float32_products

    device = torch.device("cpu" if on_cpu else "cuda")
    threads = torch.get_num_threads()
    compute_here(machine.usable_cpus)
    try:
        with torch.no_grad(), fast_float32_products(device):
            rates = {dtype: _products(torch, device, dtype) for dtype in (torch.float32, torch.bfloat16)}
            source = torch.ones(_COPIED // 4, device=device)
            target = torch.empty_like(source)
            copied = 2 * _COPIED / _fastest(lambda: target.copy_(source), device)
            small = torch.ones(64, device=device)
            launch = _fastest(lambda: [small.add_(1) for _ in range(_SMALL_OPERATIONS)], device) / _SMALL_OPERATIONS
    finally:
        compute_here(threads)
    link = copied / 2 if on_cpu else 32e9
    overhead, host = (_process_bytes(), 0.0) if on_cpu else (0.8 * 2**30, 20e9)
    wide, narrow = rates[torch.float32], rates[torch.bfloat16]
    return Device(name, on_cpu, 0.0, wide, narrow, copied, launch, link, _NETWORK, host, overhead)


def _products(torch: Any, device: Any, dtype: Any) -> float:
    """Operations a second of a product as training has them."""
    rows, inner, columns = (_ROWS, _INNER, _COLUMNS) if device.type == "cpu" else _GPU.values()
    left = torch.ones(rows, inner, device=device, dtype=dtype)
    right = torch.ones(columns, inner, device=device, dtype=dtype)
    return 2 * rows * inner * columns / _fastest(lambda: left @ right.t(), device)


def _fastest(work: Callable[[], object], device: Any) -> float:
    """Seconds of the fastest of a few attempts, the first (which prepares) apart."""
    import torch

    seconds = []
    for _ in range(_ATTEMPTS + 1):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


def _process_bytes() -> float:
    """Resident bytes of a process that has imported what a run imports, and holds nothing yet."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout.split()[-1])


def _processor() -> str:
    from hone.insight.environment import cpu_model

    return cpu_model() or platform.machine()


def _read(file: Path) -> dict[str, Any]:
    """What was measured before; nothing of a file that is damaged or of another version."""
    try:
        known = json.loads(file.read_text())
        names = {field.name for field in dataclasses.fields(Device)}
        return {key: values for key, values in known.items() if set(values) == names}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
