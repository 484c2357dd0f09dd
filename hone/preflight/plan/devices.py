"""Devices in numbers: GPUs by name and clusters of them, such as ``2x8xH100-80GB``; and this machine, measured.

Measuring a device (how fast it multiplies, moves memory and starts an operation) takes about a second. The result is kept in a
file, by processor, number of cores and version of torch. A run records the prediction of its memory.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hone.config.model import TiledMlpConfig
from hone.config.specs import spec_of
from hone.config.trees import AnyConfig, model_block
from hone.errors import ConfigError, did_you_mean
from hone.preflight import machine as machines
from hone.preflight.machine import Machine
from hone.preflight.plan.memory import memory_of
from hone.preflight.plan.model import ModelShape, Passes, shape_of
from hone.preflight.plan.work import Work, other_shapes, work_of
from hone.threads import compute_here

GIB = 2**30


@dataclass(frozen=True)
class Device:
    """Numbers of the device of one process."""

    name: str
    on_cpu: bool
    memory: float  # bytes that a process may use
    wide_rate: float  # float32 operations per second that matmuls reach (a multiplication with its addition counts two)
    narrow_rate: float  # the same in bfloat16
    bandwidth: float  # bytes per second between memory and processor
    launch: float  # seconds that a small operation takes at least
    link: float  # bytes per second to a device of the same node
    network: float  # bytes per second to a device of another node
    host: float = 0.0  # bytes per second to the host's memory; 0 on a CPU, where that is the same
    overhead: float = 0.0  # bytes that a process takes before it holds a model

    @property
    def computes_bfloat16(self) -> bool:
        return not self.on_cpu and self.name not in _WITHOUT_BFLOAT16 and self.narrow_rate > self.wide_rate

    def rate(self, *, bf16: bool) -> float:
        return self.narrow_rate if bf16 else self.wide_rate


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal devices."""

    nodes: int
    per_node: int
    device: Device


MATMUL_SHARE = 0.7  # share of the stated rate that large matmuls reach
_BANDWIDTH_SHARE = 0.85  # share of the stated bandwidth that a kernel reaches which reads and writes much
_SPECS = {
    # name: GiB, dense TFLOP/s in float32 (TF32 off) and bfloat16 (float16 where it has none), TB/s of memory, GB/s to a neighbour
    "B200-180GB": (180, 75, 2250, 8.0, 900),
    "H200-141GB": (141, 67, 989, 4.8, 450),
    "H100-80GB": (80, 67, 989, 3.35, 450),
    "A100-80GB": (80, 19.5, 312, 2.04, 300),
    "A100-40GB": (40, 19.5, 312, 1.56, 300),
    "L40S-48GB": (48, 91.6, 362, 0.864, 32),
    "A10-24GB": (24, 31.2, 125, 0.6, 32),
    "L4-24GB": (24, 30.3, 121, 0.3, 32),
    "V100-32GB": (32, 15.7, 125, 0.9, 150),
    "T4-16GB": (16, 8.1, 65, 0.3, 16),
    "RTX4090-24GB": (24, 82.6, 165, 1.01, 32),
    "RTX5090-32GB": (32, 104.8, 209, 1.79, 64),
    "MI300X-192GB": (192, 163.4, 1307, 5.3, 448),
}
_WITHOUT_BFLOAT16 = ("V100-32GB", "T4-16GB")
_USABLE = 0.94  # share of a GPU's stated memory that a process can have (error correction and the driver take the rest)
_NETWORK, _HOST = 25e9, 20e9
_LAUNCH = 6e-6
_CONTEXT = 0.8 * GIB  # CUDA's own memory in a process, and NCCL's


def known_devices() -> tuple[str, ...]:
    return tuple(_SPECS)


def device_named(name: str) -> Device:
    """Return a GPU of the table, by its name or the only name that begins like this.

    Raises ConfigError: no GPU has that name, or several do.
    """
    wanted = re.sub(r"[\s_]", "-", name.upper())
    matches = [known for known in _SPECS if f"{known.upper()}-".startswith(f"{wanted}-")]
    if len(matches) != 1:
        raise ConfigError(
            f"{len(matches) or 'no'} GPU{'s' * (len(matches) > 1)} called '{name}'",
            where="--cluster",
            fix=f"one of {', '.join(matches)}" if matches else did_you_mean(name, _SPECS),
        )
    memory, wide, narrow, bandwidth, link = _SPECS[matches[0]]
    return Device(
        name=matches[0],
        on_cpu=False,
        memory=memory * GIB * _USABLE,
        wide_rate=wide * 1e12 * MATMUL_SHARE,
        narrow_rate=narrow * 1e12 * MATMUL_SHARE,
        bandwidth=bandwidth * 1e12 * _BANDWIDTH_SHARE,
        launch=_LAUNCH,
        link=link * 1e9,
        network=_NETWORK,
        host=_HOST,
        overhead=_CONTEXT,
    )


def parse_cluster(text: str) -> Cluster:
    """Parse ``2x8xH100-80GB``: nodes x devices on each x device; ``8xH100`` is one node.

    Raises ConfigError: the text has another form.
    """
    match = re.fullmatch(r"(?:(\d+)x)?(\d+)x([A-Za-z].*)", text.strip())
    if match is None or int(match[1] or 1) < 1 or int(match[2]) < 1:
        raise ConfigError(
            f"'{text}' does not describe a cluster",
            why="it takes nodes, devices on each node, and the device",
            where="--cluster",
            fix=f"--cluster 2x8xH100-80GB (devices: {', '.join(_SPECS)})",
        )
    return Cluster(int(match[1] or 1), int(match[2]), device_named(match[3]))


_PROCESS_BYTES = 0.75 * GIB
"""What a process takes before it holds a model: torch and transformers, imported; on a GPU CUDA's own memory."""
_MATMUL = {"cpu": (1024, 512, 1536), "cuda": (8192, 4096, 4096)}
"""Rows, inner size and columns of the matmul that is measured."""
_ATTEMPTS, _COPIED, _SMALL_OPERATIONS = 5, 64 * 2**20, 2000
_IMPORTS = "import hone.trainers.rl, hone.rewards.pool, psutil; print(psutil.Process().memory_info().rss)"
_LINK, _ETHERNET = 32e9, 1.2e9
_MEASURED_LENGTH = 128  # most tokens of a prompt and of a response in the micro-batch that is measured


def local_device(config: AnyConfig, *, again: bool = False) -> Device:
    """Return the device that each process of a run gets on this machine, measured. ``again``: measure even if that was
    done before.
    """
    machine = machines.look()
    device = this_device(machine, on_cpu=_runs_on_cpu(config, machine), again=again)
    processes = 1
    if config.trainer.runtime != "local":
        processes = sum(pool.per_node for pool in spec_of(config).pools)
    if not device.on_cpu or processes == 1:
        return device
    rates = {name: getattr(device, name) / processes for name in ("memory", "wide_rate", "narrow_rate", "bandwidth")}
    return dataclasses.replace(device, **rates)


def bare_device(memory: float, *, on_cpu: bool, bfloat16: bool = False) -> Device:
    """Return a device that matters for its memory alone, with a constant for the bare process: nothing is measured."""
    overhead = _PROCESS_BYTES if on_cpu else _CONTEXT
    return Device("", on_cpu, memory, 1.0, 2.0 if bfloat16 else 1.0, 1.0, 0.0, 1.0, 1.0, 0.0, overhead)


def planned(config: AnyConfig) -> list[dict[str, Any]]:
    """Return the prediction that a run records: each pool's memory above the bare process; empty without a model shape."""
    shape = shape_of(model_block(config)[1])
    if shape is None:
        return []
    work = _local_work(config, shape)
    records = [memory_of(work, pool).as_json(GIB) for pool in work.pools]
    return [{"peak_gib": record.pop("peak"), **record} for record in records]


def _local_work(config: AnyConfig, shape: ModelShape) -> Work:
    from hone.models.devices import computes_bfloat16, run_device

    on_cpu, bfloat16 = _runs_on_cpu(config, machines.look()), computes_bfloat16(run_device(config.trainer.device))
    return work_of(config, shape, on_cpu=on_cpu, bfloat16=bfloat16, others=other_shapes(config))


def _runs_on_cpu(config: AnyConfig, machine: Machine) -> bool:
    return config.trainer.device == "cpu" or not machine.gpus


# one measured micro-batch ------------------------------------------------------------------------------------------------


def measured_scale(config: AnyConfig) -> float:
    """Return what the layers of the model keep for the backward pass, measured on this machine, divided by the estimate.

    One short micro-batch goes forward through the whole model. Without weight files nothing is measured, and the result is 1.
    """
    import torch

    from hone.data.batch import Batch
    from hone.data.ragged import Ragged
    from hone.models.heads import PolicyHead, autocast
    from hone.models.loading import load_policy
    from hone.training.packing import pack

    block, shape = model_block(config)[1], shape_of(model_block(config)[1])
    if shape is None or not any(Path(block.path or "").glob("*.safetensors")):
        return 1.0
    work = _local_work(config, shape)
    device = torch.device("cpu" if work.on_cpu else "cuda")
    block = dataclasses.replace(block, enable_gradient_checkpointing=False, tiled_mlp=TiledMlpConfig())
    model = load_policy(block, device=device, seed=1).train()
    lengths = {"prompt_ids": work.prompt, "response_ids": work.response}
    rows = {name: [[0] * min(length, _MEASURED_LENGTH)] for name, length in lengths.items()}
    packed = pack(Batch({name: Ragged.from_rows(ids, torch.int64) for name, ids in rows.items()}), device)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    dtype = "bfloat16" if work.actor.bf16 else "float32"
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast(device, dtype):
        PolicyHead()(model, packed, with_entropy=False)
    size = sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in parameters)
    tokens, responses = packed.input_ids.shape[1], len(packed.targets)
    passes = Passes(shape, work.on_cpu, work.actor.bf16, tokens, responses, lora_rank=work.actor.lora_rank)
    size -= tokens * passes.outside_kept + passes.weight_copies + passes.log_probs_kept
    return size / (tokens * shape.layers * passes.layer_kept)


# the measured device -----------------------------------------------------------------------------------------------------


def this_device(machine: Machine, *, on_cpu: bool, again: bool = False) -> Device:
    """Return the device of this machine as measured, from the file when it was measured before.

    Args:
        on_cpu: its CPUs, or its first GPU.
        again: measure even if that was done before.
    """
    import torch

    from hone.insight.environment import cpu_model

    kind = (cpu_model() or platform.machine()) if on_cpu else torch.cuda.get_device_name()
    key = f"{kind} x{machine.usable_cpus if on_cpu else 1} torch {torch.__version__}"
    file = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hone" / "devices.json"
    known = _read(file)
    if again or key not in known:
        known[key] = dataclasses.asdict(_measured(kind, on_cpu, machine))
        file.parent.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}.tmp")
        written.write_text(json.dumps(known, indent=1))
        written.replace(file)
    memory = machine.memory if on_cpu else min(gpu.total_gib for gpu in machine.gpus) * GIB
    return dataclasses.replace(Device(**known[key]), memory=memory)


def _read(file: Path) -> dict[str, Any]:
    """Return earlier measurements; nothing of a file that is damaged or of another version."""
    try:
        known = json.loads(file.read_text())
        names = {field.name for field in dataclasses.fields(Device)}
        return {key: values for key, values in known.items() if set(values) == names}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _measured(name: str, on_cpu: bool, machine: Machine) -> Device:
    import torch

    from hone.models.kernels.cpu.matmul import fast_float32_matmuls

    device, threads = torch.device("cpu" if on_cpu else "cuda"), torch.get_num_threads()
    rows, inner, columns = _MATMUL[device.type]
    compute_here(machine.usable_cpus)
    try:
        with torch.no_grad(), fast_float32_matmuls(device):
            rates = {}
            for dtype in (torch.float32, torch.bfloat16):
                left, right = (torch.ones(size, inner, device=device, dtype=dtype) for size in (rows, columns))
                seconds = _fastest(lambda left=left, right=right: left @ right.t(), device)
                rates[dtype] = 2 * rows * inner * columns / seconds
            source = torch.ones(_COPIED // 4, device=device)
            target = torch.empty_like(source)
            copied = 2 * _COPIED / _fastest(lambda: target.copy_(source), device)
            small = torch.ones(64, device=device)
            launch = _fastest(lambda: [small.add_(1) for _ in range(_SMALL_OPERATIONS)], device) / _SMALL_OPERATIONS
    finally:
        compute_here(threads)
    wide, narrow = rates[torch.float32], rates[torch.bfloat16]
    link, host, overhead = (copied / 2, 0.0, _process_bytes()) if on_cpu else (_LINK, _HOST, _CONTEXT)
    return Device(name, on_cpu, 0.0, wide, narrow, copied, launch, link, _ETHERNET, host, overhead)


def _fastest(work: Callable[[], object], device: Any) -> float:
    """Return the seconds of the fastest of a few attempts, without the first (which prepares)."""
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
    """Return the resident bytes of a process that has imported what a run imports, and holds nothing yet."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, timeout=120, check=True)
    return float(done.stdout.split()[-1])
