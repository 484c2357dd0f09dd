"""The search for a placement: which roles share devices, and how a model is divided over those that it has.

Every combination of pools (all roles together, or the engines, the critic or both on devices of their own), of tensor and
sequence parallel ranks (a ring where heads do not divide) and of copies is fitted to the devices; of those that fit, the fastest step wins. This is the search of
HybridFlow (Sheng et al. 2024, section 6) by enumeration, which is exact for this few choices.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from hone.config.derived import RunSpec
from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.preflight.plan.devices import Cluster
from hone.preflight.plan.fit import Fitter, Fitting, budget_key, set_key
from hone.preflight.plan.model import has_tensor_plan
from hone.preflight.plan.step_time import StepTime, step_time

_ACTOR = "actor_rollout_ref.actor"
_BLOCKS = {"rollout": "actor_rollout_ref.rollout", "critic": "critic"}
Size = tuple[int, int]
"""Nodes, and devices on each."""


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
