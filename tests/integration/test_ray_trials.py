"""Tasks of a sweep on a real Ray."""

import os

import pytest

pytestmark = pytest.mark.long("hone/cli", "hone/cluster/ray")


def facts(item: int) -> tuple[int, int, str]:
    return item * item, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.usefixtures("forked_ray_workers")
def test_every_item_is_a_task_of_its_own_process() -> None:
    from hone.cluster.ray.trials import run_tasks

    results = dict(run_tasks(facts, [2, 3, 4], cpus=1, gpus=0, address=None))
    assert {index: result[0] for index, result in results.items()} == {0: 4, 1: 9, 2: 16}
    assert os.getpid() not in {process for _, process, _ in results.values()}
