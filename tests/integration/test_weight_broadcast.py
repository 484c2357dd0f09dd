"""Weights reach two rollout workers by a broadcast over gloo, on a real Ray: bit for bit, and without a hang when a member fails."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import ray
from support.engine_cases import make_model, save
from support.weight_roles import FAULTY_BUCKET, ChangingActor, WatchedRollout

from hone.cluster.failures import WorkerLost
from hone.cluster.plan import model_roles
from hone.cluster.ray.connection import SETTINGS
from hone.cluster.ray.runtime import RayRuntime
from hone.cluster.weight_sync import ATTEMPTS, WeightSync
from hone.config import RLConfig, load_config
from hone.data.types import Sample

pytestmark = pytest.mark.long(
    "hone/cluster/weight_sync.py", "hone/cluster/weight_broadcast.py", "hone/cluster/weight_broadcast.py"
)

BUCKET = 20_000
"""Bytes of a bucket: the weights are several."""
CLASSES = {"actor": ChangingActor, "rollout": WatchedRollout}


@pytest.fixture(scope="module")
def cluster(forked_ray_workers: dict[str, str]) -> Iterator[None]:
    """One Ray for all tests of the module; runtimes leave it open."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@dataclass
class Run:
    """A run's workers, without its program."""

    config: RLConfig
    runtime: RayRuntime

    def sync(self) -> WeightSync:
        """A weight sync that has not connected its members."""
        prompt = Sample("canary", [1, 2, 3], None, "")
        return WeightSync(self.config, self.runtime.group("actor"), self.runtime.group("rollout"), prompt)

    def publish(self, sync: WeightSync, version: int) -> list[str]:
        """Change and send the weights, of which both engines must have exactly what is exported; return the way of each bucket."""
        rollout = self.runtime.group("rollout")

        async def once() -> list[str]:
            exported = await self.runtime.group("actor").change()
            await sync.sync(version)
            assert {dtype for _, dtype, _, _ in exported} == {"torch.bfloat16", "torch.float32"}
            assert await rollout.take_given() == [exported, exported]
            first, second = await rollout.held()
            assert first == second and len(first) == len(exported)
            ways, same = await rollout.take_ways()
            assert ways == same
            return ways

        return asyncio.run(once())


@pytest.fixture(scope="module", params=[1, 2])
def run(request: pytest.FixtureRequest, cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """An actor of one or two workers, and two rollout workers with engines in bfloat16."""
    model = save(make_model("tied"), tmp_path_factory.mktemp("model"))
    words = [
        *("trainer.runtime=ray", "trainer.device=cpu", "trainer.num_threads=1", "trainer.watchdog_seconds=0"),
        *(f"actor_rollout_ref.model.path={model}", f"trainer.n_gpus_per_node={request.param}"),
        f"trainer.default_local_dir={tmp_path_factory.mktemp('run')}",
        "actor_rollout_ref.rollout={enable_resource_pool: true, n_gpus_per_node: 2, dtype: bfloat16}",
        "actor_rollout_ref.rollout.checkpoint_engine.between_workers=broadcast",
    ]
    config = load_config(RLConfig, words)
    config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes = BUCKET / 2**20
    roles = [replace(role, cls=CLASSES[role.name]) for role in model_roles(config) if role.name in CLASSES]
    made = RayRuntime(config, roles)
    yield Run(config, made)
    made.close()


def test_both_workers_get_the_weights_bit_for_bit_twice(run: Run) -> None:
    sync = run.sync()
    for version in (1, 2):
        ways = run.publish(sync, version)
        assert len(ways) > FAULTY_BUCKET + 1 and set(ways) == {"broadcast"}
    assert sync.seconds["transfer"] > 0


def test_what_a_failed_broadcast_leaves_goes_through_the_object_store(run: Run) -> None:
    sync, rollout = run.sync(), run.runtime.group("rollout")
    buckets = len(run.publish(sync, 1))
    for version in range(2, 2 + ATTEMPTS):
        rollout.set_fault("leave", 1).result()
        ways = run.publish(sync, version)
        assert ways == ["broadcast"] * FAULTY_BUCKET + ["object_store"] * (buckets - FAULTY_BUCKET)
        if version < 1 + ATTEMPTS:
            assert set(run.publish(sync, version)) == {"broadcast"}, "the members connect again"
    assert set(run.publish(sync, 9)) == {"object_store"}, "it failed too often"


def test_a_worker_that_dies_ends_the_broadcast_at_once(run: Run) -> None:
    sync, rollout = run.sync(), run.runtime.group("rollout")
    run.publish(sync, 1)
    rollout.set_fault("die", 1).result()
    with pytest.raises(WorkerLost) as caught:
        run.publish(sync, 2)
    assert caught.value.names == ("rollout[1]",)
    run.runtime.renew(None)
    assert set(run.publish(run.sync(), 1)) == {"broadcast"}
