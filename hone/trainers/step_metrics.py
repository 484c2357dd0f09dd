"""Metrics of a step that the driver knows: updates, memory, time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import psutil
import torch

from hone.insight.invariants import MASKED_GRADIENT, RATIO_MAX, RATIO_MEAN
from hone.insight.metrics import MetricStore

if TYPE_CHECKING:
    from hone.training.objectives import Statistics, UpdateResult


def update_metrics(metrics: MetricStore, results: Sequence[UpdateResult], role: str, learning_rate: float) -> None:
    """Add the statistics of a role's optimizer updates."""
    for result in results:
        for micro_batch in result.statistics:
            for name, (value, weight) in declared_metrics(micro_batch).items():
                metrics.add(name, value, weight=weight)
        if not result.overflow:
            metrics.add(f"{role}/grad_norm", result.grad_norm)
        if result.loss_scale is not None:
            metrics.add(f"{role}/loss_scale", result.loss_scale)
            metrics.add(f"{role}/overflows", float(result.overflow))
    metrics.add(f"{role}/lr", learning_rate)


def memory_metrics(metrics: MetricStore) -> None:
    """Add the memory of this process, with the reward workers and tools that it started, and of the GPU."""
    resident, children = _resident_bytes()
    metrics.add("perf/cpu_memory_used_gb", (resident + children) / 2**30)
    metrics.add("perf/cpu_memory_used_gb/children", children / 2**30)
    if torch.cuda.is_available():
        metrics.add("perf/max_memory_allocated_gb", torch.cuda.max_memory_allocated() / 2**30)


def _resident_bytes() -> tuple[int, int]:
    here, children = psutil.Process(), 0
    for process in here.children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            children += process.memory_info().rss
    return here.memory_info().rss, children


def overhead_metrics(metrics: MetricStore, seconds: float, models: Mapping[str, float]) -> None:
    """Add step time, throughput, the share of time outside generation, models and rewards, and the idle share of each model.

    Args:
        models: seconds in which the model of each role computed.
    """
    reduced = metrics.reduce()
    busy = sum(models.values()) + reduced.get("timing_s/gen", 0.0) + reduced.get("timing_s/reward", 0.0)
    metrics.add("timing_s/step", seconds)
    metrics.add("perf/time_per_step", seconds)
    metrics.add("perf/throughput", reduced["perf/total_num_tokens"] / seconds)
    metrics.add("perf/driver_overhead_ratio", max(0.0, 1 - busy / seconds))
    for role, computed in models.items():
        if computed > 0:  # a reference that is the actor without its adapter counts as the actor
            metrics.add(f"perf/idle/{role}", max(0.0, 1 - computed / seconds))


def declared_metrics(statistics: Statistics) -> Statistics:
    """Return the statistics that are metrics, without those that only invariants read."""
    checked = (RATIO_MAX, RATIO_MEAN, MASKED_GRADIENT)
    return {name: value for name, value in statistics.items() if name not in checked}
