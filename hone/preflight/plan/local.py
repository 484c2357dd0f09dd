"""The plan of a run on this machine: what `hone plan` shows, what rules R06 and R31 judge, and what a run's record keeps."""

from __future__ import annotations

import dataclasses
from typing import Any

from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.preflight import machine as machines
from hone.preflight.evidence import model_block
from hone.preflight.machine import Machine
from hone.preflight.plan.devices import Device
from hone.preflight.plan.memory import Memory, memory_of
from hone.preflight.plan.plan import other_shapes
from hone.preflight.plan.profile import shared, this_device
from hone.preflight.plan.work import shape_of, work_of

PROCESS_BYTES = 0.75 * 2**30
"""What a process takes before it holds a model where nothing was measured: torch and transformers, imported."""
CONTEXT_BYTES = 0.8 * 2**30
"""The same on a GPU: CUDA's own memory."""


def local_device(config: AnyConfig, *, again: bool = False) -> Device:
    """The device that each process of a run gets on this machine, measured.

    Args:
        config: of the run.
        again: measure anew even if that was done before.
    """
    machine = machines.look()
    on_cpu = runs_on_cpu(config, machine)
    return shared(this_device(machine, on_cpu=on_cpu, again=again), local_processes(config))


def runs_on_cpu(config: AnyConfig, machine: Machine) -> bool:
    """Whether a run computes on CPUs here."""
    return config.trainer.device == "cpu" or not machine.gpus


def local_processes(config: AnyConfig) -> int:
    """Processes with models on one machine."""
    if not isinstance(config, RLConfig) or config.trainer.runtime != "ray":
        return 1
    from hone.preflight.cluster import pools

    return sum(per_node for _, _, per_node in pools(config))


def bare_device(memory: float, *, on_cpu: bool) -> Device:
    """A device of which only the memory matters, with a constant for the bare process: nothing is measured."""
    overhead = PROCESS_BYTES if on_cpu else CONTEXT_BYTES
    return Device("", on_cpu, memory, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, overhead)


def planned(config: AnyConfig) -> list[dict[str, Any]]:
    """What a run's record keeps: the memory of each pool's processes above the bare process; empty where no shape is known."""
    shape = shape_of(model_block(config)[1])
    if shape is None:
        return []
    work = work_of(config, shape, on_cpu=runs_on_cpu(config, machines.look()), others=other_shapes(config))
    return [record(memory_of(work, process)) for process in work.processes]


def record(memory: Memory) -> dict[str, Any]:
    """A prediction as a run's record keeps it, in GiB."""
    return {
        "pool": memory.process.pool,
        "roles": list(memory.process.roles),
        "phases": {
            phase.name: {"total": _gib(phase.total), **{part.name: _gib(part.size) for part in phase.parts}}
            for phase in memory.phases
        },
        "peak_phase": memory.peak.name,
        "peak_gib": _gib(memory.peak.total),
        "layout": dataclasses.asdict(memory.process.layout),
    }


def _gib(size: float) -> float:
    return round(size / 2**30, 4)
