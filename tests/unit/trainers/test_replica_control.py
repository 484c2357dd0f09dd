"""Requests about replicas through the run directory, answered over a pool of real replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pools import Fake, Makers, run, until

from hone.cluster.local import LocalGroup
from hone.cluster.rollout import RolloutWorker, merged_metrics
from hone.config import RLConfig, load_config
from hone.generation.build import replica_limit
from hone.generation.pool import EnginePool
from hone.insight.stop_requests import REQUEST, ReplicaAnswer, ReplicaRequest, read_answer, send_request
from hone.trainers import rl
from hone.trainers.rl import replica_requests


def configured(*overrides: str) -> RLConfig:
    return load_config(RLConfig, ["actor_rollout_ref.rollout.num_replicas=1", *overrides])


def worker(config: RLConfig, pool: EnginePool, rank: int = 0, world: int = 1) -> RolloutWorker:
    context = SimpleNamespace(config=config, tokenizer=None, roles={}, rank=rank, world=world, engine_devices=None)
    return RolloutWorker(context, engine=pool)  # type: ignore[arg-type]


async def ask(folder: Path, replicas: int | None) -> ReplicaAnswer:
    request = ReplicaRequest(replicas)
    send_request(folder, request)
    await until(lambda: read_answer(folder, request.key) is not None)
    answer = read_answer(folder, request.key)
    assert answer is not None
    return answer


def test_a_request_changes_the_number_of_replicas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(3)))
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    monkeypatch.setattr(rl, "PERIOD", 0.01)
    config, makers = configured(), Makers()

    async def work(pool: EnginePool) -> None:
        group = LocalGroup(worker(config, pool))
        send_request(tmp_path, ReplicaRequest(3))  # of an earlier process of the run
        async with replica_requests(config, tmp_path, group):
            assert not (tmp_path / REQUEST).exists()
            answer = await ask(tmp_path, None)
            assert (answer.wanted, answer.limit, len(answer.replicas)) == (1, 3, 1)
            for damaged in ("{", '{"replicas": "two"}', '{"replicas": true}'):
                (tmp_path / REQUEST).write_text(damaged)
                await until(lambda: not (tmp_path / REQUEST).exists())
            answer = await ask(tmp_path, 2)
            assert answer.wanted == 2 and not answer.refused
            await until(lambda: all(replica.serves for replica in pool.replicas))
            for count, limit in ((4, 3), (0, 1)):
                refused = (await ask(tmp_path, count)).refused
                assert str(count) in refused["what"] and refused["fix"] == f"--replicas {limit}"
            answer = await ask(tmp_path, None)
            assert [(one["replica"], one["state"], one["version"]) for one in answer.replicas] == [
                (0, "serving", 0),
                (1, "serving", 0),
            ]
            await ask(tmp_path, 1)
            await until(lambda: len(pool.replicas) == 1)
        assert len([task for task in asyncio.all_tasks() if "replicas" in task.get_name()]) == 0

    run(makers, 1, work)


def test_numbers_of_replicas_stay_when_pools_grow() -> None:
    async def work(pool: EnginePool) -> None:
        first, second = (worker(configured(), pool, rank, 2) for rank in range(2))
        metrics = [await one.take_engine_metrics() for one in (first, second)]
        assert "replica/0/num_requests" in metrics[0] and "replica/1/num_requests" in metrics[1]
        assert merged_metrics(metrics)["replica/serving"] == 2
        pool.resize(2)
        await until(lambda: len([one for one in pool.replicas if one.serves]) == 2)
        reports = [await one.replica_reports() for one in (first, second)]
        assert [[one["replica"] for one in part] for part in reports] == [[0, 2], [1, 3]]

    makers = Makers()
    makers.kind = Fake
    run(makers, 1, work)


@pytest.mark.parametrize(
    ("cores", "threads", "keys", "world", "limit"),
    [
        (8, 2, (), 1, 4),
        (8, 3, (), 1, 2),
        (2, 2, ("actor_rollout_ref.rollout.num_replicas=3",), 1, 3),
        (8, 1, ("trainer.runtime=ray", "trainer.n_gpus_per_node=4"), 4, 2),
        (8, 1, ("actor_rollout_ref.rollout.engine_url=[tcp://a:1, tcp://b:1]", "actor_rollout_ref.rollout.num_replicas=null"), 1, 2),
    ],
)  # fmt: skip
def test_the_limit_is_what_the_machine_has(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, keys: tuple[str, ...], world: int, limit: int
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert replica_limit(configured(*keys), world=world)[0] == limit
    if not any("engine_url" in key for key in keys):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        count = configured(*keys).actor_rollout_ref.rollout.num_replicas
        assert replica_limit(configured(*keys), world=world)[0] == count


@pytest.mark.parametrize(
    ("words", "device", "sleeps"),
    [
        ((), "cpu", False),
        ((), "cuda", True),
        (("actor_rollout_ref.rollout.free_cache_engine=false",), "cuda", False),
        (("actor_rollout_ref.rollout.free_cache_engine=true",), "cpu", True),
        # engines that generate during training, or that are not the run's, are never put to sleep
        (("actor_rollout_ref.rollout.free_cache_engine=true", "trainer.async.max_staleness=1"), "cuda", False),
        (("actor_rollout_ref.rollout.free_cache_engine=true", "trainer.async.stream=true"), "cuda", False),
        (("actor_rollout_ref.rollout={free_cache_engine: true, enable_resource_pool: true}",), "cuda", False),
        (("actor_rollout_ref.rollout={free_cache_engine: true, engine_url: tcp://other:7777}",), "cuda", False),
    ],
)
def test_only_engines_that_take_turns_with_training_sleep(words, device, sleeps):
    context = SimpleNamespace(
        config=load_config(RLConfig, list(words)),
        tokenizer=None,
        roles={},
        rank=0,
        world=1,
        engine_devices=None,
        device=torch.device(device),
    )
    engine: Any = object()
    assert RolloutWorker(context, engine=engine).sleeps() is sleeps  # type: ignore[arg-type]
