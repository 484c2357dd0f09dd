"""The search for a placement: which roles share devices, and how a model is divided over those that it has.

Every combination of pools (all roles together, or the engines, the critic or both apart), of tensor and sequence parallel ranks
and of copies is fitted to the devices; of those that fit, the fastest step wins. Nothing is started: a placement is a few sums.
This is the search that HybridFlow (Sheng et al. 2024, section 6) describes, by enumeration, which is exact for so few choices.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import gcd

from hone.config.tree import RLConfig
from hone.errors import ConfigError
from hone.preflight.needs import needs_critic
from hone.preflight.plan.devices import Cluster
from hone.preflight.plan.fit import Fitter, Fitting, budget_key, set_key
from hone.preflight.plan.step_time import StepTime, step_time

_ACTOR = "actor_rollout_ref.actor"
_BLOCKS = {"rollout": "actor_rollout_ref.rollout", "critic": "critic"}


@dataclass(frozen=True)
class Placement:
    """One way to use the cluster.

    Attributes:
        settings: the overrides that make it.
        words: what it is, for people.
        fitting: its memory, with the knobs that make it fit.
        time: of a step.
    """

    settings: tuple[str, ...]
    words: str
    fitting: Fitting
    time: StepTime


def placements(config: RLConfig, cluster: Cluster, fitter: Fitter, *, plan_known: bool = True) -> list[Placement]:
    """Every placement, those that fit first, the fastest first; those that do not fit by how little is missing.

    Args:
        config: of the run.
        cluster: what there is.
        fitter: for its devices.
        plan_known: whether the model says how its matrices are cut, which tensor parallelism needs.
    """
    found = []
    for settings, words, variant in _variants(config, cluster, fitter, plan_known):
        try:
            fittings = [fitter.fit(variant), fitter.fit_with_offloading(variant)]
        except ConfigError:  # sizes that do not multiply
            continue
        fittings = [_with_largest_micro_batch(fitting, fitter) for fitting in fittings]
        ways = [Placement(tuple(settings), words, fit, step_time(fit.work, cluster.device)) for fit in fittings]
        found.append(min(ways, key=_order))
    return sorted(found, key=_order)


def _with_largest_micro_batch(fitting: Fitting, fitter: Fitter) -> Fitting:
    if not fitting.fits or not fitting.largest_budget:
        return fitting
    config = copy.deepcopy(fitting.config)
    set_key(config, budget_key(config), fitting.largest_budget)
    work = fitter.work(config)
    return replace(fitting, config=config, work=work, memories=fitter.memories(work))


def _order(placement: Placement) -> tuple[bool, float, int]:
    """Placements that fit as they are before those that train another model (LoRA), then by time, then by simplicity."""
    fitting = placement.fitting
    measure = placement.time.total if fitting.fits else fitting.fullest.peak.total
    return not fitting.fits, measure * (1000 if _changes_the_run(fitting) else 1), len(placement.settings)


def _changes_the_run(fitting: Fitting) -> bool:
    return fitting.fits and any("lora_rank" in knob.setting for knob in fitting.knobs)


def _variants(
    config: RLConfig, cluster: Cluster, fitter: Fitter, plan_known: bool
) -> Iterator[tuple[list[str], str, RLConfig]]:
    apart = [(), ("rollout",)] + ([("critic",), ("rollout", "critic")] if needs_critic(config) else [])
    for roles in apart:
        for nodes, per_node, own in _pools(cluster, roles):
            heads = gcd(fitter.shape.heads, fitter.shape.key_value_heads)
            tensors = [size for size in _powers(per_node) if heads % size == 0 and (size == 1 or plan_known)]
            for tensor, sequence in itertools.product(tensors, _powers(per_node)):
                if tensor * sequence > per_node or (heads // tensor) % sequence:
                    continue
                copies = [-1] + ([per_node // tensor] if nodes > 1 else [])
                for size in copies:
                    variant = copy.deepcopy(config)
                    settings = [
                        set_key(variant, "trainer.runtime", "ray"),
                        set_key(variant, "trainer.nnodes", nodes),
                        set_key(variant, "trainer.n_gpus_per_node", per_node),
                        set_key(variant, f"{_ACTOR}.tensor_model_parallel_size", tensor),
                        set_key(variant, f"{_ACTOR}.ulysses_sequence_parallel_size", sequence),
                        set_key(variant, f"{_ACTOR}.fsdp_config.fsdp_size", size),
                    ]
                    for role in _BLOCKS:
                        set_key(variant, f"{_BLOCKS[role]}.enable_resource_pool", False)
                    for role in roles:
                        settings += [
                            set_key(variant, f"{_BLOCKS[role]}.enable_resource_pool", True),
                            set_key(variant, f"{_BLOCKS[role]}.nnodes", own[role][0]),
                            set_key(variant, f"{_BLOCKS[role]}.n_gpus_per_node", own[role][1]),
                        ]
                    yield settings, _words(nodes, per_node, tensor, sequence, size, own), variant


def _pools(cluster: Cluster, roles: tuple[str, ...]) -> Iterator[tuple[int, int, dict[str, tuple[int, int]]]]:
    """How the devices are shared out: by whole nodes where there are enough, else by devices of the one node."""
    if not roles:
        yield cluster.nodes, cluster.per_node, {}
        return
    whole = cluster.nodes > len(roles)
    units = cluster.nodes if whole else cluster.per_node
    if not whole and cluster.nodes > 1:
        return
    for sizes in itertools.product(_powers(units), repeat=len(roles)):
        left = units - sum(sizes)
        if left < 1:
            continue
        pool = (lambda size: (size, cluster.per_node)) if whole else (lambda size: (1, size))
        nodes, per_node = pool(left)
        yield nodes, per_node, {role: pool(size) for role, size in zip(roles, sizes, strict=True)}


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def _words(nodes: int, per_node: int, tensor: int, sequence: int, size: int, own: dict[str, tuple[int, int]]) -> str:
    world = nodes * per_node
    text = f"{'all roles together' if not own else 'actor'} on {nodes}x{per_node}"
    shards = (world // tensor) if size == -1 else size
    text += f", weights over {shards * tensor} rank{'s' * (shards * tensor > 1)}"
    details = [f"tensor {tensor}" if tensor > 1 else "", f"sequence {sequence}" if sequence > 1 else ""]
    copies = world // (shards * tensor)
    details.append(f"{copies} copies" if copies > 1 else "")
    if any(details):
        text += f" ({', '.join(detail for detail in details if detail)})"
    return text + "".join(f"; {role} on its own {pool[0]}x{pool[1]}" for role, pool in own.items())
