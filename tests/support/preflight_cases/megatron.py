"""Cases of the rules about strategy=megatron."""

from __future__ import annotations

from support.preflight_cases.keys import ACTOR, RAY
from support.preflight_cases.world import Case, World


def softer_activation(world: World) -> None:
    """Give the model an activation that the backend does not compute."""
    world.settings(hidden_act="gelu")


def usual_activation(world: World) -> None:
    """Restore the model's configuration."""
    world.settings()


MEGATRON_CASES = [
    Case(
        "R88 layouts.megatron_supports_the_settings",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        ("ulysses_sequence_parallel_size=2", "Transformer Engine"),
        advice=f"{ACTOR}.ulysses_sequence_parallel_size=1, or {ACTOR}.strategy=fsdp2",
        then=f"{ACTOR}.ulysses_sequence_parallel_size=1",
        given=f"{ACTOR}.strategy=megatron {RAY} trainer.n_gpus_per_node=2",
    ),
    Case(
        "R89 layouts.megatron_supports_the_models",
        says=("hidden_act=gelu",),
        advice=f"{ACTOR}.strategy=fsdp2",
        breaks=softer_activation,
        repairs=usual_activation,
        given=f"{ACTOR}.strategy=megatron {RAY} trainer.n_gpus_per_node=2",
    ),
]
"""Cases of the rules about Megatron in ``hone/preflight/layouts.py``."""
