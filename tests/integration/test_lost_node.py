"""A node of the cluster is lost with its worker: it is said so, and the worker gets a place on another node."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from support.fragile_role import Fragile
from support.patience import LONG, SOON

from hone.cluster.context import RoleSpec
from hone.cluster.failures import WorkerLost
from hone.cluster.ray.connection import SETTINGS
from hone.cluster.ray.runtime import RayRuntime
from hone.config import RLConfig, load_config

pytestmark = pytest.mark.long("hone/cluster/supervisor.py", "hone/cluster/ray")


def test_a_worker_whose_node_is_lost_moves_to_another(forked_ray_workers, tmp_path: Path):
    for name, value in {**SETTINGS, "RAY_AUTH_MODE": "disabled"}.items():
        os.environ.setdefault(name, value)
    node = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 2}
    head = {**node, "include_dashboard": False, "_system_config": soon}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    others = {added.node_id: added for added in [cluster.add_node(**node), cluster.add_node(**node)]}
    ray.init(address=cluster.address, log_to_driver=False)
    config = load_config(
        RLConfig,
        [
            *("trainer.runtime=ray", "trainer.device=cpu", "trainer.num_threads=1", "trainer.nnodes=2"),
            f"trainer.default_local_dir={tmp_path}",
        ],
    )
    try:
        cluster.wait_for_nodes(LONG)
        runtime = RayRuntime(config, [RoleSpec("fragile", Fragile)])
        nodes = [node for _, _, node in runtime.group("fragile").places().result()]
        lost = next(rank for rank, node in enumerate(nodes) if node in others)
        cluster.remove_node(others[nodes[lost]], allow_graceful=False)
        deadline = time.monotonic() + SOON
        with pytest.raises(WorkerLost) as caught:
            while time.monotonic() < deadline:  # until Ray has noticed
                runtime.group("fragile").places().result()
                time.sleep(0.1)
        assert caught.value.names == (f"main[{lost}]",)
        assert re.search("was killed|lost with its node", caught.value.what), "whichever Ray sees first"
        for attempt in range(3):  # what Ray has not noticed yet is another loss, as the run would count it
            try:
                runtime.renew("step_5")
                break
            except WorkerLost:
                assert attempt < 2
        found = runtime.group("fragile").places().result()
        assert [resume for _, resume, _ in found] == ["step_5", "step_5"]
        assert found[lost][2] not in (nodes[lost], found[1 - lost][2])
        runtime.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
