"""Training backends, which hold a model and its optimizer and apply updates. ``actor.strategy`` selects one.

To add a backend: a folder with a class that implements :class:`~hone.training.backends.protocol.TrainBackend`, a line below,
and the conformance suite (``tests/support/train_backend_suite.py``). A backend is imported at its first use.
"""

from __future__ import annotations

from hone.training.backends.registry import BACKENDS, BackendEntry

BACKENDS.register("local")(BackendEntry("hone.training.backends.local:LocalBackend", most_processes=1))
BACKENDS.register("fsdp2", "fsdp")(
    BackendEntry("hone.training.backends.fsdp2.backend:Fsdp2Backend", fewest_processes=2, pipelines=True)
)
BACKENDS.register("megatron")(
    BackendEntry(
        "hone.training.backends.megatron.backend:MegatronBackend",
        pipelines=True,
        package="megatron-core",
        module="megatron",
        extra="megatron",
    )
)
