"""Rules about the device and the dtype."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.derived import dtype_line
from hone.config.dtypes import dtype_keys
from hone.config.trees import TREES, AnyConfig
from hone.preflight import machine
from hone.preflight.rules import Finding, Stage, error, rule, warning

_SLOWER = 1.5  # ratio of the times of a bfloat16 and a float32 matmul above which the rule warns


@rule("R02", *TREES.values(), stage=Stage.ENVIRONMENT)
def cuda_present(config: AnyConfig) -> Iterator[Finding]:
    """The configured device exists."""
    if config.trainer.device == "cuda" and not _cuda():
        yield error(
            "trainer.device=cuda, but torch finds no CUDA GPU",
            fix="trainer.device=auto (uses a GPU when there is one) or trainer.device=cpu",
            where="trainer.device",
        )


@rule("R07", *TREES.values(), stage=Stage.ENVIRONMENT)
def dtype_supported(config: AnyConfig) -> Iterator[Finding]:
    """The GPU supports the configured dtypes."""
    if config.trainer.device == "cpu" or not _cuda():
        return
    import torch

    keys = _bfloat16_keys(config)
    if keys and not computes_bfloat16(config):
        yield error(
            f"{torch.cuda.get_device_name()} does not support bfloat16",
            fix=" ".join(f"{key}=float32" for key in keys),
            where=keys[0],
        )


@rule("R07", *TREES.values(), stage=Stage.ENVIRONMENT)
def bfloat16_is_fast_here(config: AnyConfig) -> Iterator[Finding]:
    """A CPU that computes in bfloat16 has instructions for it; without them float32 is several times faster."""
    keys = _bfloat16_keys(config)
    elsewhere = config.trainer.device != "cpu" and config.trainer.runtime == "ray"
    if not keys or elsewhere or not on_cpu(config):
        return
    cost = machine.bfloat16_cost()
    if cost > _SLOWER:
        yield warning(
            f"{' and '.join(f'{key}=bfloat16' for key in keys)}, but on this CPU a bfloat16 matmul takes {cost:.1f} times as long as "
            "in float32 (measured)",
            why="the CPU has no bfloat16 instructions, or slow ones; the update is slower, and its numbers less exact",
            fix=" ".join(f"{key}=float32" for key in keys),
            where=keys[0],
        )


def computes_bfloat16(config: AnyConfig) -> bool:
    """Return whether the run's device is a GPU of this machine with instructions for bfloat16."""
    from hone.models.devices import computes_bfloat16, run_device

    return computes_bfloat16(run_device(config.trainer.device))


def describe_dtype(config: AnyConfig) -> str:
    """Return the compute dtype of the trained model and where it comes from; on a cluster each worker's device decides."""
    if config.trainer.runtime == "ray" and config.ray.address is not None:
        line = dtype_line(config)
        return f"{line.value} ({line.reason})"
    key, bfloat16 = dtype_keys(config)[0], computes_bfloat16(config)
    return f"{key.resolved(bfloat16=bfloat16)} ({key.source(bfloat16=bfloat16)})"


def _bfloat16_keys(config: AnyConfig) -> list[str]:
    return [entry.key for entry in dtype_keys(config) if entry.value == "bfloat16"]


def on_cpu(config: AnyConfig) -> bool:
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and not _cuda())


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
