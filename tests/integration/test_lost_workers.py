"""What is said when a worker comes to grief, and that the others go on with a new one."""

from __future__ import annotations

import os
import time
import traceback

import pytest
import ray
from support.fragile_role import Fragile

from hone.cluster.context import RoleSpec
from hone.cluster.failures import OutOfMemory, WorkerLost
from hone.cluster.ray.connection import SETTINGS
from hone.cluster.ray.runtime import RayRuntime
from hone.config import RLConfig, load_config
from hone.config.limits import CPU_MICRO_BATCH_TOKENS
from hone.errors import EXIT_FAILED, ConfigError

pytestmark = pytest.mark.long(
    "hone/cluster/supervisor.py", "hone/cluster/watcher.py", "hone/cluster/failures.py", "hone/cluster/ray"
)


@pytest.fixture(scope="module")
def runtime(forked_ray_workers, tmp_path_factory: pytest.TempPathFactory):
    """Two workers that share a process group."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    config = load_config(
        RLConfig,
        [
            *("trainer.runtime=ray", "trainer.device=cpu", "trainer.num_threads=1", "trainer.n_gpus_per_node=2"),
            f"trainer.default_local_dir={tmp_path_factory.mktemp('run')}",
        ],
    )
    made = RayRuntime(config, [RoleSpec("fragile", Fragile)])
    yield made
    made.close()
    ray.shutdown()


@pytest.mark.parametrize(
    ("how", "cause", "last_words"),
    [
        ("be_killed", "was killed, in 'fragile.suffer'", "about to be_killed"),
        ("crash", "crashed (segmentation fault), in 'fragile.suffer'", "in crash"),
        ("exit", "in 'fragile.suffer'", "about to exit"),
    ],
)
def test_a_dead_worker_is_named_and_replaced(runtime: RayRuntime, how: str, cause: str, last_words: str):
    (first, _), (second, _) = runtime.group("fragile").facts().result()
    with pytest.raises(WorkerLost) as caught:
        runtime.group("fragile").suffer(how).result()
    shown = caught.value.render()
    assert caught.value.names == ("main[1]",) and f"main[1] (pid {second} on " in shown
    assert cause in shown and last_words in shown
    assert caught.value.exit_code == EXIT_FAILED
    with pytest.raises(WorkerLost):
        runtime.group("fragile").facts().result()

    runtime.renew("checkpoints/step_3")
    (same, resume), (new, _) = runtime.group("fragile").facts().result()
    assert same == first and new not in (first, second) and resume == "checkpoints/step_3"
    assert runtime.pools["main"].pids == [same, new]


def test_a_worker_that_is_ended_for_hanging_is_lost(runtime: RayRuntime):
    assert not runtime.kill("main[2]") and runtime.kill("main[0]")
    with pytest.raises(WorkerLost) as caught:
        for _ in range(100):  # Ray does not wait for its end: it may answer once more
            runtime.group("fragile").facts().result()
            time.sleep(0.1)
    assert caught.value.names == ("main[0]",)
    runtime.renew(None)
    assert len(runtime.group("fragile").facts().result()) == 2


def test_a_mistake_found_in_a_worker_is_the_one_message(runtime: RayRuntime):
    with pytest.raises(ConfigError) as caught:
        runtime.group("fragile").suffer("make_a_mistake").result()
    found = caught.value
    assert (found.code, found.where, found.fix, found.exit_code) == ("R71", "model", "heads=4", 2)
    runtime.renew(None)  # the rank that waited for it is ended too


def test_a_bug_is_raised_with_its_own_traceback(runtime: RayRuntime):
    with pytest.raises(KeyError, match="missing key") as caught:
        runtime.group("fragile").suffer("have_a_bug").result()
    assert type(caught.value) is KeyError
    shown = "".join(traceback.format_exception(caught.value))
    assert 'in a_function_of_the_user\n    return found["missing key"]' in shown and "It was raised in main[1]" in shown
    assert "RayTaskError" not in shown and "ray::" not in shown
    runtime.renew(None)


def test_memory_that_is_refused_names_the_plan_and_the_knob(runtime: RayRuntime):
    with pytest.raises(OutOfMemory) as caught:
        runtime.group("fragile").suffer("want_too_much_memory").result()
    shown = caught.value.render()
    assert "main[1]: fragile.suffer" in shown and "The plan: " in shown
    assert (
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={CPU_MICRO_BATCH_TOKENS // 2}" in shown
    )  # half of what went together
