"""Devices in numbers: GPUs by name, as their makers state them, and clusters of them such as ``2x8xH100-80GB``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hone.errors import ConfigError, did_you_mean

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
