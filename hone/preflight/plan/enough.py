"""Hardware that is enough for a model: the fewest devices of one node that hold a run, by method and kind of GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hone.config.load import load_config
from hone.config.tree import RLConfig
from hone.config.trees import TREES
from hone.errors import ConfigError
from hone.preflight.plan.devices import Cluster, device_named
from hone.preflight.plan.plan import model_shape, plan_of, search

GPUS = ("A10-24GB", "L40S-48GB", "H100-80GB", "H200-141GB")
"""One GPU of each size of memory that is common."""
COUNTS = (1, 2, 8)
_LORA = ("actor_rollout_ref.model.lora_rank=32", "actor_rollout_ref.model.target_modules=all-linear")
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    "GRPO, all weights": ("train", ("algorithm.adv_estimator=grpo",)),
    "GRPO, LoRA": ("train", ("algorithm.adv_estimator=grpo", *_LORA)),
    "GRPO, LoRA on 4 bits": (
        "train",
        ("algorithm.adv_estimator=grpo", *_LORA, "actor_rollout_ref.model.quantization=nf4"),
    ),
    "PPO, all weights": ("train", ("algorithm.adv_estimator=gae",)),
    "SFT, all weights": ("sft", ()),
    "SFT, LoRA": ("sft", ("model.lora_rank=32", "model.target_modules=all-linear")),
    "DPO, all weights": ("prefer", ()),
}
"""Command and keys of each method."""
_OF_METHODS = ("lora_rank", "quantization")
"""Keys by which a plan may fit that make another method of this table."""


@dataclass(frozen=True)
class Enough:
    method: str
    gpu: str
    devices: int | None  # None: not even the most of COUNTS
    keys: tuple[str, ...] = ()  # that make it fit, besides those of the method
    peak: float = 0.0  # bytes of the fullest process

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def enough(model: str) -> Iterator[Enough]:
    """Yield the fewest devices for each method on each kind of GPU, as `hone plan` predicts.

    Lengths and batches are the defaults. Raises ModelError: ``model`` has no config.json of a decoder.
    """
    for method, (command, keys) in METHODS.items():
        for gpu in GPUS:
            yield next(_fitting(method, command, keys, gpu, model), Enough(method, gpu, None))


def _fitting(method: str, command: str, keys: tuple[str, ...], gpu: str, model: str) -> Iterator[Enough]:
    where = "actor_rollout_ref.model.path" if command == "train" else "model.path"
    device, given = device_named(gpu), " ".join(keys)
    for count in COUNTS[:1] if "quantization" in given else COUNTS:  # a base in 4 bits trains in one process
        sizes = ("trainer.runtime=ray", f"trainer.n_gpus_per_node={count}") if count > 1 else ()
        config = load_config(TREES[command], [f"{where}={model!r}", *keys, *sizes])
        try:
            search_for = isinstance(config, RLConfig) and count > 1
            shape = model_shape(config)
            plan = (
                search(config, Cluster(1, count, device), shape=shape)
                if search_for
                else plan_of(config, device, shape=shape)
            )
        except ConfigError:  # sizes that do not divide the model
            continue
        added = tuple(knob.setting for knob in plan.fitting.knobs)
        if plan.fitting.fits and all(key in given for key in _OF_METHODS if key in " ".join(added)):
            peak = max(memory.peak.total for memory in plan.fitting.memories)
            yield Enough(method, gpu, count, added, peak)
