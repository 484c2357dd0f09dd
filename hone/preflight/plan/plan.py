"""The plan of a run: its memory, its time, what fits, and with a cluster where its parts should live."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

from hone.config.model import ModelConfig
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig
from hone.errors import ConfigError, ModelError
from hone.preflight.evidence import model_block
from hone.preflight.needs import needs_critic
from hone.preflight.plan.devices import Cluster, Device
from hone.preflight.plan.fit import Fitter, Fitting
from hone.preflight.plan.memory import Memory
from hone.preflight.plan.model import ModelShape
from hone.preflight.plan.search import Placement, placements
from hone.preflight.plan.step_time import StepTime, step_time
from hone.preflight.plan.work import Work, shape_of


@dataclass(frozen=True)
class Plan:
    """What is said of a run before it starts.

    Attributes:
        config: as asked for, or (with a cluster) as placed.
        device: that each process has.
        work: the run in numbers.
        memories: of one process of each pool, with the settings as they are.
        time: of a step.
        fitting: with the knobs that make it fit.
        limit: bytes that a process may fill.
        placements: that were compared, the best first; empty without a cluster.
    """

    config: AnyConfig
    device: Device
    work: Work
    memories: tuple[Memory, ...]
    time: StepTime
    fitting: Fitting
    limit: float
    placements: tuple[Placement, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether it fits as it is."""
        return all(memory.peak.total <= self.limit for memory in self.memories)


def plan_of(config: AnyConfig, device: Device, *, shape: ModelShape | None = None) -> Plan:
    """Plan a run on devices of one kind, as its configuration places it.

    Args:
        config: of the run.
        device: that each process has.
        shape: of the trained model; None reads its config.json.

    Raises:
        ModelError: the model's config.json says nothing of a decoder.
        ConfigError: the sizes of parallelism do not divide.
    """
    fitter = Fitter(device, shape or model_shape(config), other_shapes(config))
    work = fitter.work(config)
    return Plan(config, device, work, fitter.memories(work), step_time(work, device), fitter.fit(config), fitter.limit)


def search(config: RLConfig, cluster: Cluster, *, shape: ModelShape | None = None) -> Plan:
    """Find the best placement of a run on a cluster, and plan it.

    Raises:
        ConfigError: the settings leave nothing to place.
    """
    from hone.preflight.layouts import has_tensor_plan

    shape = shape or model_shape(config)
    fitter = Fitter(cluster.device, shape, other_shapes(config))
    found = placements(config, cluster, fitter, plan_known=has_tensor_plan(shape.kind))
    if not found:
        raise ConfigError(
            f"no placement of this run on {cluster.nodes}x{cluster.per_node}",
            why="no sizes of parallelism divide the model's heads and the devices",
            where="--cluster",
            fix="--cluster with a power of two of devices on each node",
        )
    best = found[0]
    chosen = placed(config, best)
    work = fitter.work(chosen)
    return Plan(
        chosen,
        cluster.device,
        work,
        fitter.memories(work),
        step_time(work, cluster.device),
        best.fitting,
        fitter.limit,
        tuple(found),
    )


def placed(config: RLConfig, placement: Placement) -> RLConfig:
    """The configuration with a placement and the knobs that make it fit."""
    return copy.deepcopy(placement.fitting.config) if isinstance(placement.fitting.config, RLConfig) else config


def model_shape(config: AnyConfig) -> ModelShape:
    """The shape of the trained model.

    Raises:
        ModelError: its config.json is missing, or is none of a decoder.
    """
    where, block = model_block(config)
    found = shape_of(block)
    if found is None:
        raise ModelError(
            f"'{block.path}' has no config.json of a decoder",
            why="its layers, widths and vocabulary decide about memory and time; weights are not needed",
            where=f"{where}.path",
            fix=f"{where}.path=<Hugging Face model directory, or a folder with its config.json>",
        )
    return found


def other_shapes(config: AnyConfig) -> dict[str, ModelShape]:
    """Shapes of a critic and a reward model that are not the trained model."""
    if not isinstance(config, RLConfig):
        return {}
    paths = {
        "critic": config.critic.model.path if needs_critic(config) else None,
        "reward_model": config.reward.reward_model.path if config.reward.reward_model.enable else None,
    }
    shapes = {role: shape_of(ModelConfig(path=path)) for role, path in paths.items() if path}
    return {role: shape for role, shape in shapes.items() if shape is not None}


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain data; sizes in bytes, times in seconds."""
    return {
        "device": {**dataclasses.asdict(plan.device)},
        "model": dataclasses.asdict(plan.work.actor.shape),
        "fits": plan.fits,
        "limit": plan.limit,
        "pools": [_pool(memory) for memory in plan.memories],
        "step_seconds": plan.time.as_json(),
        "largest_micro_batch": plan.fitting.largest_budget,
        "fits_with_knobs": plan.fitting.fits,
        "knobs": [dataclasses.asdict(knob) for knob in plan.fitting.knobs],
        "placements": [_placement(placement) for placement in plan.placements],
    }


def _pool(memory: Memory) -> dict[str, Any]:
    process = memory.process
    return {
        "pool": process.pool,
        "nodes": process.nodes,
        "per_node": process.per_node,
        "roles": list(process.roles),
        "layout": dataclasses.asdict(process.layout),
        "peak_phase": memory.peak.name,
        "peak": memory.peak.total,
        "phases": {
            phase.name: {"total": phase.total, **{part.name: part.size for part in phase.parts}}
            for phase in memory.phases
        },
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
