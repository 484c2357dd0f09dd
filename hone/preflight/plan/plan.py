"""The plan of a run: its memory, its time, what fits, and with a cluster where its roles should live."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from hone.config.dtypes import dtype_keys
from hone.config.tree import RLConfig
from hone.config.trees import AnyConfig, model_block
from hone.data.model_settings import read_settings
from hone.errors import ConfigError, ModelError
from hone.preflight.plan.devices import Cluster, Device
from hone.preflight.plan.fit import Fitter, Fitting
from hone.preflight.plan.memory import Memory
from hone.preflight.plan.model import ModelShape, shape_of
from hone.preflight.plan.search import Placement, placements
from hone.preflight.plan.step_time import StepTime, step_time
from hone.preflight.plan.work import Work, other_shapes


@dataclass(frozen=True)
class Plan:
    """The prediction for a run, as it is or, with a cluster, as placed.

    Attributes:
        memories: of one process of each pool, with the settings as they are.
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
        """True when it fits as it is."""
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

    Raises:
        ConfigError: the settings leave nothing to place.
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
    """Return the compute dtype of the trained model, and where it comes from."""
    key, bfloat16 = dtype_keys(plan.config)[0], plan.device.computes_bfloat16
    return key.resolved(bfloat16=bfloat16), key.source(bfloat16=bfloat16)


def model_shape(config: AnyConfig) -> ModelShape:
    """Return the shape of the trained model.

    Raises:
        ModelError: its config.json is missing, or does not describe a decoder.
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
