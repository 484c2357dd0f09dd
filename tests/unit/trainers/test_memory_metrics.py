"""The memory of a run is that of all its processes; named numbers of rewards are bounded."""

import subprocess
import sys

import torch

from hone.insight.metrics import MetricStore
from hone.rewards.score import Score
from hone.trainers.reporting import MOST_TERMS, _reward_metrics
from hone.trainers.step_metrics import memory_metrics


def used(name: str = "perf/cpu_memory_used_gb") -> float:
    store = MetricStore()
    memory_metrics(store)
    return store.reduce()[name]


def test_memory_counts_the_processes_that_a_run_started() -> None:
    """A reward worker that keeps objects would not be seen otherwise."""
    before, others = used(), used("perf/cpu_memory_used_gb/children")
    code = "import sys; kept = b'x' * (300 << 20); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        during, child_gb = used(), used("perf/cpu_memory_used_gb/children") - others
        child.communicate()
    assert during - before > 0.25 > used() - before
    assert 0.25 < child_gb < 0.4


def test_a_reward_with_many_names_adds_64_metrics() -> None:
    metrics = MetricStore()
    scores = [Score(1.0, {f"row{row}_{number}": float(number) for number in range(40)}) for row in range(2)]
    _reward_metrics(metrics, scores, ["a", "b"], torch.ones(2))
    logged = metrics.reduce()
    assert logged.pop("reward/unlogged_terms") == 16
    assert len(logged) == MOST_TERMS == 64 and logged["reward/row1_23/mean"] == 23.0
