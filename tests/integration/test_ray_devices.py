"""Placement on logical GPUs: Ray hands out eight devices that no machine here has, and every process says which it sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from support.ray_roles import Prober

from hone.cluster.context import RoleSpec
from hone.cluster.ray.connection import SETTINGS
from hone.cluster.ray.runtime import RayRuntime
from hone.config import RLConfig, load_config
from hone.errors import ConfigError

pytestmark = pytest.mark.long
APART = "enable_resource_pool: true, nnodes: 1"


@pytest.fixture(scope="module", autouse=True)
def cluster(forked_ray_workers: dict[str, str]) -> Iterator[None]:
    """One node with eight GPUs, by its own account."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    size = {"num_cpus": 4, "num_gpus": 8, "object_store_memory": 100 * 2**20}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, **size)
    yield
    ray.shutdown()


def configured(run: Path, *overrides: str) -> RLConfig:
    """A run whose workers take GPUs from Ray; torch finds none in them and computes on the CPU."""
    own = ("trainer.runtime=ray", "trainer.device=auto", "trainer.num_threads=1", "trainer.watchdog_seconds=0")
    return load_config(RLConfig, [*own, f"trainer.default_local_dir={run}", *overrides])


def visible_devices(runtime: RayRuntime, role: str) -> list[tuple[int, str | None]]:
    """Process id and CUDA_VISIBLE_DEVICES of every worker; the engines that it starts inherit its environment."""
    return runtime.group(role).where("CUDA_VISIBLE_DEVICES").result()


def test_every_process_gets_devices_of_its_own(tmp_path: Path) -> None:
    config = configured(
        tmp_path, "trainer.n_gpus_per_node=2", f"actor_rollout_ref.rollout={{{APART}, n_gpus_per_node: 2}}"
    )
    runtime = RayRuntime(config, [RoleSpec(name, Prober, replicated=True) for name in ("actor", "rollout")])
    try:
        seen = [devices for name in ("actor", "rollout") for _, devices in visible_devices(runtime, name)]
    finally:
        runtime.close()
    handed_out = [int(device or "") for device in seen]
    assert len(handed_out) == 4 == len(set(handed_out)) and set(handed_out) <= set(range(8))


def test_a_share_of_a_device_puts_processes_on_the_same_one(tmp_path: Path) -> None:
    config = configured(tmp_path, "trainer.n_gpus_per_node=2", "ray.device_fraction=0.5")
    runtime = RayRuntime(config, [RoleSpec("actor", Prober, replicated=True)])
    try:
        first, second = visible_devices(runtime, "actor")
    finally:
        runtime.close()
    assert first[0] != second[0] and first[1] == second[1] is not None


def test_more_devices_than_there_are_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        RayRuntime(configured(tmp_path, "trainer.n_gpus_per_node=9"), [RoleSpec("actor", Prober, replicated=True)])
    assert caught.value.code == "R02" and "9 GPUs" in str(caught.value) and "8" in str(caught.value)
