"""Measurements of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from hone.config import RLConfig
from hone.preflight import machine
from hone.preflight.environment import describe_dtype
from hone.preflight.rules import findings

measured = machine.bfloat16_cost  # before the fixture of all these tests replaces it


def test_bfloat16_cost_is_the_ratio_of_the_shortest_times(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[torch.dtype] = []
    clock = [0.0]

    def slow(states: Tensor, weight: Tensor) -> Tensor:
        tries.append(states.dtype)
        busy = len(tries) % 5 == 0  # something else runs
        clock[0] += (0.008 if states.dtype == torch.bfloat16 else 0.002) + 0.02 * busy
        return weight

    monkeypatch.setattr(torch.nn.functional, "linear", slow)
    monkeypatch.setattr(machine.time, "perf_counter", lambda: clock[0])
    threads = torch.get_num_threads()
    assert measured() == pytest.approx(4)
    assert torch.get_num_threads() == threads
    assert tries.count(torch.bfloat16) == tries.count(torch.float32) == 20


def test_the_threads_are_restored_when_a_matmul_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Tensor) -> Tensor:
        raise RuntimeError("E17")

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(RuntimeError, match="E17"):
            measured()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("device", "runtime", "dtype", "cost", "warns"),
    [
        ("cpu", "local", "bfloat16", 6.1, True),
        ("auto", "local", "bfloat16", 6.1, True),
        ("cpu", "local", "bfloat16", 0.3, False),
        ("cpu", "local", "float32", 6.1, False),
        ("cpu", "ray", "bfloat16", 6.1, True),
        ("auto", "ray", "bfloat16", 6.1, True),  # a cluster that is started here
        ("auto", "ray at a:1", "bfloat16", 6.1, False),  # the workers may have GPUs
    ],
)
def test_slow_bfloat16_is_a_warning_on_a_cpu(
    rl: RLConfig,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    runtime: str,
    dtype: str,
    cost: float,
    warns: bool,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "bfloat16_cost", lambda: cost)
    rl.trainer.device, rl.trainer.runtime, rl.actor_rollout_ref.actor.dtype = device, runtime.partition(" ")[0], dtype
    rl.ray.address = runtime.partition(" at ")[2] or None
    warnings = [finding for finding in findings(rl) if finding.error.code == "R07"]
    assert [finding.stops for finding in warnings] == [False] * warns
    if warns:
        assert (
            "6.1 times" in warnings[0].error.what and warnings[0].error.fix == "actor_rollout_ref.actor.dtype=float32"
        )


@pytest.mark.parametrize(
    ("supported", "address", "device", "begins"),
    [
        (True, None, "auto", "bfloat16 (actor_rollout_ref.actor.dtype=auto"),
        (False, None, "auto", "float32 (actor_rollout_ref.actor.dtype=auto"),
        (False, "head:6379", "auto", "bfloat16 on a GPU that computes in it, else float32 ("),
        (True, "head:6379", "cpu", "float32 ("),
    ],
)
def test_the_start_names_the_dtype_and_on_a_cluster_leaves_it_to_the_workers(
    rl: RLConfig, monkeypatch: pytest.MonkeyPatch, supported: bool, address: str | None, device: str, begins: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: supported)
    rl.trainer.runtime, rl.trainer.device, rl.ray.address = "ray", device, address
    assert describe_dtype(rl).startswith(begins)


def test_a_folder_is_tried_where_permissions_say_nothing(tmp_path: Path) -> None:
    assert "in /proc (" in machine.write_problem(Path("/proc/run/deeper"))
    assert machine.write_problem(tmp_path / "a b" / "ü") == "" and not list(tmp_path.iterdir())
