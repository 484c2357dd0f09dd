"""The same program on Ray: the same numbers with one worker bit for bit, with two within the rounding of sums."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from support.world import World, metrics, rl_command

from hone.cluster.ray.connection import SETTINGS
from hone.config import RLConfig, load_config
from hone.trainers.rl import train

pytestmark = pytest.mark.slow

RATE = "actor_rollout_ref.actor.optim.lr=1e-3"
KINDS = {"grpo": ("grpo", RATE), "ppo": ("ppo", RATE), "lora": ("grpo", RATE, "actor_rollout_ref.model.lora_rank=4")}
COPIED = "rollout/canary_gap"


@pytest.fixture(scope="module")
def nodes(forked_ray_workers):
    """Two Ray nodes on this machine, two CPUs each; runs find them connected and leave them open."""
    for name, value in {**SETTINGS, "RAY_AUTH_MODE": "disabled"}.items():
        os.environ.setdefault(name, value)
    node = {"num_cpus": 2, "object_store_memory": 150 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    cluster.add_node(**node)
    ray.init(address=cluster.address, log_to_driver=False)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def run(world: World, where: Path, kind: str, *overrides: str) -> list[dict]:
    preset, *own = KINDS[kind]
    words = rl_command(world, where, preset, f"data.val_files={world.val}", *own, "trainer.test_freq=3", *overrides)
    config = load_config(
        RLConfig, [*words[2:], "trainer.total_training_steps=5", "trainer.watchdog_seconds=0"], preset=preset
    )
    assert train(config) == 0
    return metrics(where)


@pytest.fixture(scope="module")
def local(world: World, tmp_path_factory: pytest.TempPathFactory):
    """Metrics of the runs in one process."""
    found: dict[str, list[dict]] = {}

    def of(kind: str) -> list[dict]:
        if kind not in found:
            found[kind] = run(world, tmp_path_factory.mktemp(kind) / "run", kind)
            assert [row["step"] for row in found[kind]] == list(range(6))
        return found[kind]

    return of


def without_canary(rows: list[dict]) -> list[dict]:
    gaps = [row.pop(COPIED) for row in rows if row["step"]]
    assert max(gaps) < 1e-5, "engines and trainer agree after every publication"
    return rows


def assert_close(rows: list[dict], expected: list[dict], tolerance: float) -> None:
    assert [sorted(row) for row in rows] == [sorted(row) for row in expected]
    for row, other in zip(rows, expected, strict=True):
        far = {n: (row[n], v) for n, v in other.items() if abs(row[n] - v) > tolerance * max(1.0, abs(v))}
        assert not far, f"step {row['step']}"


def test_one_worker_gives_the_same_numbers(nodes, world, local, tmp_path):
    assert run(world, tmp_path / "run", "grpo", "trainer.runtime=ray") == local("grpo")


def test_critic_and_reference_apart_give_the_same_numbers(nodes, world, local, tmp_path):
    apart = ("critic.enable_resource_pool=true", "actor_rollout_ref.ref.enable_resource_pool=true")
    assert run(world, tmp_path / "run", "ppo", "trainer.runtime=ray", *apart) == local("ppo")


def test_rollout_apart_gets_the_weights(nodes, world, local, tmp_path):
    apart = "actor_rollout_ref.rollout.enable_resource_pool=true"
    found = without_canary(run(world, tmp_path / "run", "grpo", "trainer.runtime=ray", apart))
    assert found == local("grpo")


def test_rollout_apart_gets_merged_adapters(nodes, world, local, tmp_path):
    apart = "actor_rollout_ref.rollout.enable_resource_pool=true"
    found = without_canary(run(world, tmp_path / "run", "lora", "trainer.runtime=ray", apart))
    assert_close(found, local("lora"), 1e-4)


def test_two_workers_on_two_nodes_train_as_one(nodes, world, local, tmp_path):
    found = run(world, tmp_path / "run", "grpo", "trainer.runtime=ray", "trainer.nnodes=2", "trainer.save_freq=5")
    balance = [row.pop(name) for row in found for name in [n for n in row if n.startswith("global_seqlen/")]]
    assert balance, "the balance of the ranks is logged"
    assert_close(without_canary(found), local("grpo"), 1e-5)
    assert (tmp_path / "run/checkpoints/step_5/actor/config.json").is_file()
