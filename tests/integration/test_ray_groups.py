"""Worker groups on a real Ray: what goes out, what comes back, what stays there, and what it costs the driver."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import ray
from support.messages import raises
from support.ray_roles import Prober

from hone.cluster.context import RoleSpec
from hone.cluster.dispatch import RowGroups
from hone.cluster.ray.connection import SETTINGS, connect
from hone.cluster.ray.runtime import RayRuntime, check_versions
from hone.config import RLConfig, load_config
from hone.config.run import RayConfig
from hone.errors import ConfigError

pytestmark = pytest.mark.long("hone/cluster")

TOKENS = 2048


def configured(run: Path, *overrides: str) -> RLConfig:
    own = [
        *("trainer.runtime=ray", "trainer.device=cpu", "trainer.num_threads=1", "trainer.watchdog_seconds=0"),
        f"trainer.default_local_dir={run}",
    ]
    return load_config(RLConfig, [*own, *overrides])


@pytest.fixture(scope="module")
def cluster(forked_ray_workers):
    """One Ray for all tests of the module; runtimes leave it open."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=4, include_dashboard=False, object_store_memory=300 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def runtime(cluster, tmp_path_factory):
    """Two workers, each with the rows of its own and a process of its own."""
    config = configured(
        tmp_path_factory.mktemp("run"),
        "trainer.n_gpus_per_node=2",
        "ray.env_vars={all: {HONE_TEST: everyone}, prober: {HONE_TEST: prober}}",
    )
    roles = [RoleSpec("prober", Prober, replicated=True), RoleSpec("long", Prober, {"length": TOKENS}, replicated=True)]
    made = RayRuntime(config, roles)
    yield made
    made.close()


def test_rows_go_out_balanced_and_come_back_in_order(runtime):
    prober = runtime.group("prober")
    names = [str(number) for number in range(7)]
    batch = prober.make(names).result()
    assert batch.uids == names and prober.dp_size == 2
    batch = batch.updated(prober.double(batch).result())
    found = prober.read(batch.reorder([6, 0, 3])).result()
    assert found["uid"] == ["6", "0", "3"] and found["note"] == ["note 6", "note 0", "note 3"]
    assert found["double"] == [[2 * token for token in row] for row in found["response_ids"]]
    assert found["response_ids"][0] != found["response_ids"][1]
    assert prober.tokens(batch).result() == 7 * 4, "answers of all ranks are reduced"


def test_equal_shares_are_filled_up_and_the_filling_is_dropped(runtime):
    prober = runtime.group("prober")
    batch = prober.make([str(number) for number in range(5)]).result()
    assert prober.read(prober.count(batch).result()).result()["count"] == [3] * 5
    single = prober.make(["8"]).result()
    assert single.uids == ["8"], "a worker without a row gives none"
    assert prober.read(prober.count(single).result()).result() == {"count": [1], "uid": ["8"]}


def test_groups_of_rows_are_divided_one_by_one(runtime):
    prober = runtime.group("prober")
    batch = prober.make([str(number) for number in range(6)]).result()
    first, second = prober.parts(batch, RowGroups([[5, 4], [0, 1, 2, 3], [5]])).result()
    for mini, one, other in zip([{"5", "4"}, {"0", "1", "2", "3"}, {"5"}], first, second, strict=True):
        assert set(one) | set(other) == mini and len(one) + len(other) == len(mini)
        assert abs(len(one) - len(other)) <= 1


def test_every_way_to_ask(runtime):
    prober = runtime.group("prober")
    assert prober.ranked([10, 11]).result() == [(0, 10), (1, 11)]
    pids = {pid for pid, _ in prober.where("HOME").result()}
    assert len(pids) == 2 and os.getpid() not in pids
    assert {pid for pid, _ in runtime.group("long").where("HOME").result()} == pids, "roles of a pool share processes"
    assert {value for _, value in prober.where("HONE_TEST").result()} == {"prober"}
    assert prober.take(prober.weights().result()).result() == [10.0, 10.0]
    with pytest.raises(AttributeError, match="nothing"):
        prober.nothing()


def test_what_a_worker_raises_is_raised_here(runtime):
    prober = runtime.group("prober")
    with pytest.raises(ConfigError) as caught:
        prober.fail("mistake").result()
    assert (caught.value.code, caught.value.fix) == ("R99", "a=4")
    with pytest.raises(KeyError, match="a bug"):
        prober.fail("bug").result()


def test_the_driver_does_not_grow_with_the_batch(runtime):
    """64 MiB of tokens against 1 MiB: the driver holds names, lengths and references of both."""
    role, driver = runtime.group("long"), psutil.Process()

    def grown(rows: int) -> float:
        before = driver.memory_info().rss
        batch = role.make([str(number % 50) for number in range(rows)]).result()
        batch = batch.updated(role.double(batch).result())
        assert role.total(batch.reorder(list(range(len(batch)))[::-1])).result() > 0
        return (driver.memory_info().rss - before) / 2**20

    grown(64)  # what is loaded once
    small, large = grown(64), grown(4096)
    assert 4096 * TOKENS * 8 == 64 * 2**20
    assert large < 8, f"the driver grew by {small:.1f} MiB for 1 MiB of tokens, by {large:.1f} MiB for 64 MiB"


def test_more_devices_than_there_are(cluster, tmp_path):
    with raises(ConfigError, "9 CPUs", "main 3 x 3", 4, "trainer.nnodes", code="R02"):
        RayRuntime(configured(tmp_path, "trainer.nnodes=3", "trainer.n_gpus_per_node=3"), [RoleSpec("prober", Prober)])
    with raises(ConfigError, "'main'", "ray.start_timeout"):  # enough devices, but on one node
        RayRuntime(configured(tmp_path, "trainer.nnodes=2", "ray.start_timeout=1"), [RoleSpec("prober", Prober)])


def test_a_fraction_of_a_device_lets_workers_share_it(cluster, runtime, tmp_path):
    roles = [RoleSpec("prober", Prober, replicated=True)]
    sharing = RayRuntime(configured(tmp_path, "trainer.n_gpus_per_node=4", "ray.device_fraction=0.25"), roles)
    try:
        assert len({pid for pid, _ in sharing.group("prober").where("HOME").result()}) == 4
    finally:
        sharing.close()


def test_other_versions_in_a_worker():
    here = {"hone": "1", "torch": "2.13"}
    check_versions(here, dict(here), "main[0]")
    with raises(ConfigError, "main[1]", "torch 2.11", "2.13", code="E-versions"):
        check_versions(here, {"hone": "1", "torch": "2.11"}, "main[1]")


def test_nothing_answers_at_the_address():
    with raises(ConfigError, "127.0.0.1:1", "ray start --head", where="ray.address"):
        connect(RayConfig(address="127.0.0.1:1"), workers=1)


ENDING = """
import contextlib, sys
from hone.cluster.ray.connection import connect
from hone.config.run import RayConfig
with contextlib.suppress(ValueError), contextlib.closing(connect(RayConfig(), workers=1)):
    if sys.argv[1] == "failed":
        raise ValueError
"""


@pytest.mark.parametrize(("end", "left"), [("finished", 0), ("failed", 1)])
def test_the_logs_of_a_cluster_stay_only_after_an_error(end: str, left: int) -> None:
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short path: sockets are in it
        subprocess.run([sys.executable, "-c", ENDING, end], env={**os.environ, "RAY_TMPDIR": folder}, check=True)
        sessions = [path for path in Path(folder).rglob("session_*") if path.is_dir() and not path.is_symlink()]
        assert len(sessions) == left
