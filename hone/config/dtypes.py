"""Compute dtypes of a run, and what ``auto`` means. It does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig


def is_narrow(dtype: str) -> bool:
    """Return whether a number of a resolved compute dtype takes two bytes."""
    return dtype in ("bfloat16", "float16")


class DtypeKey(NamedTuple):
    """A key with a compute dtype, and its value."""

    key: str
    value: str

    def resolved(self, *, bfloat16: bool) -> str:
        """Return float32, bfloat16 or float16; see :func:`resolve_dtype`."""
        return resolve_dtype(self.value, bfloat16=bfloat16)

    def source(self, *, bfloat16: bool) -> str:
        """Return where the resolved dtype comes from, such as ``dtype=auto: the GPU computes in it``."""
        setting = f"{self.key}={self.value}"
        if self.value != "auto":
            return setting
        return f"{setting}: {'the GPU computes in it' if bfloat16 else 'no GPU that computes in bfloat16'}"


def resolve_dtype(dtype: str, *, bfloat16: bool) -> str:
    """Return the dtype that a ``dtype`` key means; this is the only rule for ``auto``. ``bfloat16``: whether the device
    is a GPU with instructions for bfloat16. CPUs count as devices without.
    """
    if dtype != "auto":
        return dtype
    return "bfloat16" if bfloat16 else "float32"


def dtype_keys(config: AnyConfig) -> list[DtypeKey]:
    """Return the keys of a run's compute dtypes; the first is that of the trained model.

    Keys that take the dtype of the trained model are left out: ``rollout.dtype=auto`` and ``critic.dtype=null``.
    """
    if not isinstance(config, RLConfig):
        return [DtypeKey("dtype", config.dtype)]
    roles = config.actor_rollout_ref
    keys = [DtypeKey("actor_rollout_ref.actor.dtype", roles.actor.dtype)]
    if roles.rollout.dtype != "auto":
        keys.append(DtypeKey("actor_rollout_ref.rollout.dtype", roles.rollout.dtype))
    if config.critic.dtype is not None:
        keys.append(DtypeKey("critic.dtype", config.critic.dtype))
    return keys
