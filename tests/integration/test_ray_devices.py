"""Placement on logical GPUs: Ray hands out eight devices that no machine here has, and every process says which it sees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from support.ray_roles import Prober

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import RowGroups
from hone.cluster.plan import model_roles
from hone.cluster.ray.connection import SETTINGS
from hone.cluster.ray.runtime import RayRuntime
from hone.config import RLConfig, load_config
from hone.errors import ConfigError

pytestmark = pytest.mark.long("hone/cluster/ray")
APART = "enable_resource_pool: true, nnodes: 1"


@pytest.fixture(scope="module", autouse=True)
def cluster(forked_ray_workers: dict[str, str]) -> Iterator[None]:
    """One node with eight GPUs, by its own account."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    size = {"num_cpus": 16, "num_gpus": 8, "object_store_memory": 100 * 2**20}
    ray.init(address="local", include_dashboard=False, log_to_driver=False, **size)
    yield
    ray.shutdown()


def configured(run: Path, *overrides: str) -> RLConfig:
    """A run whose workers take GPUs from Ray; torch finds none in them and computes on the CPU."""
    own = ("trainer.runtime=ray", "trainer.device=auto", "trainer.num_threads=1", "trainer.watchdog_seconds=0")
    own += ("ray.start_timeout=120",)
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


def names(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def test_an_engine_has_the_devices_of_its_workers(tmp_path: Path) -> None:
    """Eight workers, engines of two devices: four of the workers play, and each starts an engine on its device and the next one's."""
    config = configured(
        tmp_path,
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.rollout={name: vllm, tensor_model_parallel_size: 2}",
    )
    group = next(role.group for role in model_roles(config) if role.name == "rollout")
    roles = [RoleSpec("actor", Prober), RoleSpec("rollout", Prober, replicated=True, group=group)]
    runtime = RayRuntime(config, roles)
    try:
        rollout = runtime.group("rollout")
        own = [device for _, device in visible_devices(runtime, "actor")]
        assert sorted(own) == names(8)
        engines = rollout.engine().result()
        assert engines == [(rank, (own[rank], own[rank + 1])) for rank in (0, 2, 4, 6)]
        lent = dict(rollout.gathered().result())
        assert lent == dict(engines) | dict.fromkeys((1, 3, 5, 7), ())
        assert rollout.dp_size == 4 and [rollout.rank(number).result() for number in range(4)] == [0, 2, 4, 6]
        made = rollout.make(names(8)).result()
        assert made.uids == names(8)
        parts = rollout.parts(made, RowGroups([list(range(8))])).result()
        assert [len(uids) for (uids,) in parts] == [2, 2, 2, 2] and sorted(
            sum((uids for (uids,) in parts), [])
        ) == names(8)
        assert rollout.tokens(made).result() == 8 * 4
    finally:
        runtime.close()


def test_engines_and_a_reward_model_apart_from_training(tmp_path: Path) -> None:
    """An engine of 2 x 2 devices, a reward model on two and training on two: no device is handed out twice."""
    sizes = "name: vllm, tensor_model_parallel_size: 2, data_parallel_size: 2"
    config = configured(
        tmp_path,
        "trainer.n_gpus_per_node=2",
        f"actor_rollout_ref.rollout={{{APART}, n_gpus_per_node: 4, {sizes}}}",
        f"reward.reward_model={{enable: true, path: judge, {APART}, n_gpus_per_node: 2}}",
    )
    roles = [replace(role, cls=Prober) for role in model_roles(config)]
    assert [(role.name, role.group) for role in roles] == [("actor", 1), ("rollout", 4), ("reward_model", 1)]
    runtime = RayRuntime(config, roles)
    try:
        of_role = {role.name: runtime.group(role.name).gathered().result() for role in roles}
        seen = {
            role.name: [gpu for _, gpu in visible_devices(runtime, role.name)]
            for role in roles
            if role.name != "rollout"
        }
        (engine,) = runtime.group("rollout").engine().result()
    finally:
        runtime.close()
    assert len(of_role["rollout"]) == 4 and engine[0] == 0 and len(engine[1]) == 4
    assert sorted([*seen["actor"], *seen["reward_model"], *engine[1]]) == names(8)


def test_workers_of_an_engine_never_share_a_device(tmp_path: Path) -> None:
    config = configured(
        tmp_path,
        *("trainer.n_gpus_per_node=2", "ray.device_fraction=0.5"),
        "actor_rollout_ref.rollout={name: vllm, tensor_model_parallel_size: 2}",
    )
    with pytest.raises(ConfigError) as caught:
        RayRuntime(config, [RoleSpec("rollout", Prober, replicated=True, group=2)])
    assert caught.value.code == "R79" and caught.value.where == "ray.device_fraction"
