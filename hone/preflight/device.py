"""Rules about the machine."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.tree import RLConfig
from hone.config.trees import TREES, AnyConfig
from hone.preflight.rules import Finding, Stage, error, rule


@rule("R02", *TREES.values(), stage=Stage.ENVIRONMENT)
def cuda_present(config: AnyConfig) -> Iterator[Finding]:
    """The device asked for exists."""
    if config.trainer.device == "cuda" and not _cuda():
        yield error(
            "trainer.device=cuda, and torch finds no CUDA GPU",
            fix="trainer.device=auto (takes a GPU when there is one) or trainer.device=cpu",
            where="trainer.device",
        )


@rule("R07", *TREES.values(), stage=Stage.ENVIRONMENT)
def dtype_supported(config: AnyConfig) -> Iterator[Finding]:
    """The GPU computes in the dtypes asked for; every CPU does, some of them slowly."""
    if config.trainer.device == "cpu" or not _cuda():
        return
    import torch

    keys = [key for key, dtype in dtypes(config).items() if dtype == "bfloat16"]
    if keys and not torch.cuda.is_bf16_supported(including_emulation=False):
        yield error(
            f"{torch.cuda.get_device_name()} does not compute in bfloat16",
            fix=" ".join(f"{key}=float32" for key in keys),
            where=keys[0],
        )


def dtypes(config: AnyConfig) -> dict[str, str | None]:
    """Return the compute dtypes of a run by key."""
    if not isinstance(config, RLConfig):
        return {"dtype": config.dtype}
    roles = config.actor_rollout_ref
    return {
        "actor_rollout_ref.actor.dtype": roles.actor.dtype,
        "actor_rollout_ref.rollout.dtype": roles.rollout.dtype,
        "critic.dtype": config.critic.dtype,
    }


def on_cpu(config: AnyConfig) -> bool:
    """Return whether the run computes on the CPU of this machine."""
    return config.trainer.device == "cpu" or (config.trainer.device == "auto" and not _cuda())


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
