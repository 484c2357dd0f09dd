"""The plan of a run: its memory, its time, what fits, and with a cluster where its roles should live.

Every combination of pools (all roles together, or the engines, the critic or both on devices of their own), of tensor and sequence parallel
ranks (a ring where heads do not divide) and of copies is fitted to the devices; of those that fit, the fastest step wins. This is the search
of HybridFlow (Sheng et al. 2024, section 6) by enumeration, which is exact for this few choices.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from hone.config.derived import RunSpec
from hone.config.dtypes import dtype_keys
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.data.model_settings import read_settings
from hone.errors import ConfigError, ModelError
from hone.preflight.plan.devices import Cluster, Device
from hone.preflight.plan.fit import Fitter, Fitting, budget_key, set_key
from hone.preflight.plan.memory import Memory
from hone.preflight.plan.model import ModelShape, has_tensor_plan, shape_of
from hone.preflight.plan.step_time import StepTime, step_time
from hone.preflight.plan.work import Work, other_shapes


@dataclass(frozen=True)
class Plan:
    """The prediction for a run, as it is or, with a cluster, as placed."""

    config: AnyConfig
    device: Device
    work: Work
    memories: tuple[Memory, ...]  # of one process of each pool, with the settings as they are
    time: StepTime
    fitting: Fitting
    limit: float  # bytes that a process may fill
    placements: tuple[Placement, ...] = ()  # that were compared, the best first; empty without a cluster

    @property
    def fits(self) -> bool:
        return all(memory.peak.total <= self.limit for memory in self.memories)


def plan_of(
    config: AnyConfig, device: Device, *, shape: ModelShape | None = None, activation_scale: float = 1.0
) -> Plan:
    """Plan a run on devices of one kind, as its configuration places it.

    Raises:
        ModelError: the model's config.json does not describe a decoder.
        ConfigError: the sizes of parallelism do not divide.
    """
    fitter = Fitter(device, shape or model_shape(config), other_shapes(config), activation_scale)
    return _plan(config, fitter, fitter.fit(config))


def search(config: RLConfig, cluster: Cluster, *, shape: ModelShape | None = None) -> Plan:
    """Return the plan of the best placement of a run on a cluster.

    Raises ConfigError: the settings leave nothing to place.
    """
    fitter = Fitter(cluster.device, shape or model_shape(config), other_shapes(config))
    ranked = placements(config, cluster, fitter)
    if not ranked:
        raise ConfigError(
            f"no placement of this run on {cluster.nodes}x{cluster.per_node}",
            why="no sizes of parallelism divide the model's heads and the devices",
            where="--cluster",
            fix="--cluster with a power of two of devices on each node",
        )
    return _plan(ranked[0].fitting.config, fitter, ranked[0].fitting, tuple(ranked))


def _plan(config: AnyConfig, fitter: Fitter, fitting: Fitting, ranked: tuple[Placement, ...] = ()) -> Plan:
    work, device = fitter.work(config), fitter.device
    return Plan(config, device, work, fitter.memories(work), step_time(work, device), fitting, fitter.limit, ranked)


def dtype_of(plan: Plan) -> tuple[str, str]:
    key, bfloat16 = dtype_keys(plan.config)[0], plan.device.computes_bfloat16
    return key.resolved(bfloat16=bfloat16), key.source(bfloat16=bfloat16)


def model_shape(config: AnyConfig) -> ModelShape:
    """Return the shape of the trained model.

    Raises ModelError: its config.json is missing, or does not describe a decoder.
    """
    where, block = model_block(config)
    shape = shape_of(block)
    if shape is None:
        read_settings(block.path)
        raise ModelError(
            f"'{block.path}' has no config.json of a decoder",
            why="its layers, widths and vocabulary decide about memory and time; weights are not needed",
            where=f"{where}.path",
            fix=f"{where}.path=<Hugging Face model directory, or a folder with its config.json>",
        )
    return shape


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data; sizes in bytes, times in seconds."""
    return {
        "device": dataclasses.asdict(plan.device),
        "model": dataclasses.asdict(plan.work.actor.shape),
        "dtype": dict(zip(("value", "source"), dtype_of(plan), strict=True)),
        "fits": plan.fits,
        "limit": plan.limit,
        "pools": [memory.as_json() for memory in plan.memories],
        "step_seconds": plan.time.as_json(),
        "largest_micro_batch": plan.fitting.largest_budget,
        "fits_with_knobs": plan.fitting.fits,
        "knobs": [dataclasses.asdict(knob) for knob in plan.fitting.knobs],
        "faster": plan.fitting.faster,
        "activation_scale": plan.work.activation_scale,
        "placements": [_placement(placement) for placement in plan.placements],
    }


def _placement(placement: Placement) -> dict[str, Any]:
    fitting = placement.fitting
    return {
        "settings": list(placement.settings),
        "words": placement.words,
        "fits": fitting.fits,
        "knobs": [knob.setting for knob in fitting.knobs],
        "micro_batch": fitting.largest_budget,
        "peak": fitting.fullest.peak.total,
        "peak_phase": fitting.fullest.peak.name,
        "step_seconds": placement.time.as_json(),
    }


_ACTOR = "actor_rollout_ref.actor"
_BLOCKS = {"rollout": "actor_rollout_ref.rollout", "critic": "critic"}
Size = tuple[int, int]  # nodes, and devices on each


@dataclass(frozen=True)
class Placement:
    """One way to use the cluster, and the overrides that make it."""

    settings: tuple[str, ...]
    words: str
    fitting: Fitting
    time: StepTime

    @property
    def order(self) -> tuple[bool, bool, float, int]:
        """Sort key: placements that fit, without adapters where possible, by time or missing memory, by simplicity."""
        fits, knobs = self.fitting.fits, self.fitting.knobs
        adapters = fits and any("lora_rank" in knob.setting for knob in knobs)
        return not fits, adapters, self.time.total if fits else self.fitting.fullest.peak.total, len(self.settings)


def placements(config: RLConfig, cluster: Cluster, fitter: Fitter) -> list[Placement]:
    """Return every placement: the fastest first, then those that do not fit by the memory that is missing."""
    ranked = []
    for settings, words, variant in _variants(config, cluster, fitter):
        try:
            fittings = [fitter.fit(variant), fitter.fit_with_offloading(variant)]
        except ConfigError:  # sizes that do not multiply
            continue
        fittings = [_with_largest_micro_batch(fitting, fitter) for fitting in fittings]
        ways = [Placement(settings, words, fit, step_time(fit.work, cluster.device)) for fit in fittings]
        ranked.append(min(ways, key=lambda way: way.order))
    return sorted(ranked, key=lambda placement: placement.order)


def _with_largest_micro_batch(fitting: Fitting, fitter: Fitter) -> Fitting:
    if not fitting.fits or not fitting.largest_budget:
        return fitting
    config = copy.deepcopy(fitting.config)
    set_key(config, budget_key(config), fitting.largest_budget)
    work = fitter.work(config)
    return replace(fitting, config=config, work=work, memories=fitter.memories(work))


def _variants(config: RLConfig, cluster: Cluster, fitter: Fitter) -> Iterator[tuple[tuple[str, ...], str, RLConfig]]:
    heads = gcd(fitter.shape.heads, fitter.shape.key_value_heads)
    separate = [(), ("rollout",)] + ([("critic",), ("rollout", "critic")] if RunSpec(config).critic.value else [])
    divides = has_tensor_plan(fitter.shape.kind)
    for (nodes, per_node), pools in (sizes for roles in separate for sizes in _pools(cluster, roles)):
        for tensor, row in itertools.product(_powers(per_node), repeat=2):
            if tensor * row > per_node or heads % tensor or (tensor > 1 and not divides):
                continue
            sequence, context = (row, 1) if heads % (tensor * row) == 0 else (1, row)
            for shards in [-1] + ([per_node // tensor] if nodes > 1 else []):
                variant = copy.deepcopy(config)
                keys = {
                    "trainer.runtime": "ray",
                    "trainer.nnodes": nodes,
                    "trainer.n_gpus_per_node": per_node,
                    f"{_ACTOR}.tensor_model_parallel_size": tensor,
                    f"{_ACTOR}.ulysses_sequence_parallel_size": sequence,
                    f"{_ACTOR}.context_parallel_size": context,
                    f"{_ACTOR}.fsdp_config.fsdp_size": shards,
                }
                for role, block in _BLOCKS.items():
                    set_key(variant, f"{block}.enable_resource_pool", False)
                    if role in pools:
                        keys[f"{block}.enable_resource_pool"] = True
                        keys[f"{block}.nnodes"], keys[f"{block}.n_gpus_per_node"] = pools[role]
                settings = tuple(set_key(variant, key, value) for key, value in keys.items())
                yield settings, _describe((nodes, per_node), (tensor, sequence, context), shards, pools), variant


def _pools(cluster: Cluster, roles: tuple[str, ...]) -> Iterator[tuple[Size, dict[str, Size]]]:
    """Yield the sizes of the main pool and of pools for ``roles``: whole nodes if there are enough, else parts of one node."""
    whole = cluster.nodes > len(roles)
    if not whole and cluster.nodes > 1:
        return
    units = cluster.nodes if whole else cluster.per_node
    for sizes in itertools.product(_powers(units), repeat=len(roles)):
        if sum(sizes) < units:
            main, *others = [(size, cluster.per_node) if whole else (1, size) for size in (units - sum(sizes), *sizes)]
            yield main, dict(zip(roles, others, strict=True))


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _describe(main: Size, divided: tuple[int, int, int], shards: int, pools: dict[str, Size]) -> str:
    world, (tensor, sequence, context) = main[0] * main[1], divided
    ranks = world if shards == -1 else shards * tensor
    sizes = {"tensor {}": tensor, "sequence {}": sequence, "context {}": context, "{} copies": world // ranks}
    details = ", ".join(text.format(size) for text, size in sizes.items() if size > 1)
    return (
        f"{'actor' if pools else 'all roles together'} on {main[0]}x{main[1]}, weights over {ranks} "
        f"rank{'s' * (ranks > 1)}{f' ({details})' if details else ''}"
        + "".join(f"; {role} on its own {size[0]}x{size[1]}" for role, size in pools.items())
    )
