"""Memory of the models of a run, without activations and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

from hone.config.limits import TRAINED_BYTES

ADAPTER_SHARE = 0.015
"""Parameters of rank-32 adapters on all linear layers, as a share of the model; 1 to 2 percent for 0.5B to 70B."""
FROZEN_BYTES = 2
"""Bytes of a frozen parameter in bfloat16, as on a GPU; a CPU holds float32."""
HEADROOM = 0.8
"""Share of the memory that models may use; the rest is for activations, the KV cache and fragmentation."""


@dataclass(frozen=True)
class Model:
    """One model of a run and its memory in GB (10^9 bytes)."""

    role: str
    how: str
    gigabytes: float


def model_memory(role: str, parameters: int, how: str) -> Model:
    """Return the memory of a model of ``parameters`` that is ``trained``, ``frozen`` or trained by ``LoRA``."""
    weight = {
        "trained": TRAINED_BYTES,
        "frozen": FROZEN_BYTES,
        "LoRA": FROZEN_BYTES + ADAPTER_SHARE * TRAINED_BYTES,
    }[how]
    return Model(role, how, parameters * weight / 1e9)
