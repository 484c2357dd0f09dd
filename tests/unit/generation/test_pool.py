"""The pool over engines that a test controls: choice of replica, retries, weights, back-pressure, no request lost or doubled."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.messages import raises
from support.pools import WEIGHTS, Fake, Makers, ask, collect, expected, run, until

from hone.config.engines import ServerPoolConfig
from hone.data.types import StopReason
from hone.errors import GenerationError, ProcessError
from hone.generation.pool import EnginePool, ReplicaState
from hone.generation.pool.pool import PublishedWeights, within
from hone.generation.pool.replica import Concurrency, Replica
from hone.generation.protocol import Completion

pytestmark = pytest.mark.application("hone/generation")


def test_requests_go_to_the_replica_with_the_fewest_outstanding_tokens() -> None:
    makers = Makers(seconds=0.05)

    async def work(pool: EnginePool) -> None:
        await collect(pool, [ask(0, tokens=100), *(ask(number, tokens=10) for number in range(1, 6))])

    run(makers, 2, work)
    assert [sorted(fake.served) for fake in makers.made] == [["r0"], ["r1", "r2", "r3", "r4", "r5"]]


def test_an_episode_stays_on_its_replica_until_it_ends() -> None:
    makers = Makers(seconds=0.01)

    async def work(pool: EnginePool) -> None:
        for turn in range(4):
            await collect(pool, [ask(10 * turn + k, session=f"episode {k}") for k in range(6)])
        await pool.end_sessions([f"episode {k}" for k in range(6)])
        assert not pool._homes

    run(makers, 3, work)
    for k in range(6):
        homes = {fake.index for fake in makers.made for turn in range(4) if f"r{10 * turn + k}" in fake.served}
        assert len(homes) == 1
    assert all(len(fake.ended) == 6 and len(fake.served) == 8 for fake in makers.made)


def test_a_lost_replica_restarts_and_its_requests_are_served_elsewhere() -> None:
    makers = Makers(seconds=0.05)

    async def work(pool: EnginePool) -> None:
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(40)]))
        await until(lambda: makers.living(0).under_way > 0)
        makers.living(0).dead = True
        answers = await asking
        assert sorted(c.request_id for c in answers) == sorted(f"r{number}" for number in range(40))
        assert all(c.token_ids == expected(ask(int(c.request_id[1:]))) for c in answers)
        await until(lambda: pool.replicas[0].state is ReplicaState.SERVING)
        assert pool.replicas[0].starts == 2 and pool.replicas[0].window.retried > 0

    run(makers, 2, work)


def test_a_probe_detects_a_replica_that_hangs() -> None:
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        makers.living(0).hangs = True
        answers = await collect(pool, [ask(number) for number in range(8)])
        assert len(answers) == 8
        await until(lambda: pool.replicas[0].state is ReplicaState.SERVING)
        assert not pool.replicas[0].problem and pool.replicas[0].starts == 2

    run(makers, 2, work, limits=ServerPoolConfig(health_check_period=0.05, health_check_timeout=1.0))


def test_a_request_that_takes_too_long_goes_to_another_replica_and_fails_at_last() -> None:
    makers = Makers()
    limits = ServerPoolConfig(request_timeout=1.0, max_attempts=3, health_check_period=60)

    async def work(pool: EnginePool) -> None:
        makers.living(0).seconds = 60
        assert len(await collect(pool, [ask(0), ask(1)])) == 2
        makers.living(1).seconds = 60
        with raises(GenerationError, "r2", "1 s", "3 times", "server_pool.request_timeout=2"):
            await collect(pool, [ask(2)])
        assert not makers.living(0).under_way and not makers.living(1).under_way

    run(makers, 2, work, limits=limits)


def test_an_error_of_one_request_is_its_caller_s_alone() -> None:
    async def work(pool: EnginePool) -> None:
        with raises(GenerationError, "thirteen"):
            await collect(pool, [ask(0, tokens=13)])
        assert len(await collect(pool, [ask(1)])) == 1
        assert [replica.starts for replica in pool.replicas] == [1, 1]

    run(Makers(), 2, work)


def test_weights_reach_all_replicas_and_one_that_restarts_later() -> None:
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        await pool.load_weights(WEIGHTS[:100], 1, last=False)
        assert {replica.state for replica in pool.replicas} == {ReplicaState.FENCED}
        await pool.load_weights(WEIGHTS[100:], 1)
        answers = await collect(pool, [ask(number) for number in range(6)])
        assert {c.weight_versions for c in answers} == {(1, 1)}
        makers.living(0).dead = True
        answers = await collect(pool, [ask(number) for number in range(6)])
        await until(lambda: pool.replicas[0].state is ReplicaState.SERVING)
        answers += await collect(pool, [ask(number, session=str(number)) for number in range(20, 40)])
        assert {c.weight_versions for c in answers} == {(1, 1)} and makers.living(0).life == 1
        assert makers.living(0).served.count("admission") == 1

    run(makers, 2, work)


def test_new_weights_are_checked_when_engines_resume_after_a_pause() -> None:
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        await pool.pause()
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(6)]))
        makers.living(0).dead = True
        await pool.load_weights(WEIGHTS, 1)
        await asyncio.sleep(0.1)
        assert not any(name != "admission" for fake in makers.made for name in fake.served), "nothing during the pause"
        await pool.resume()
        assert {c.weight_versions for c in await asking} == {(1, 1)}
        await until(lambda: all(replica.state is ReplicaState.SERVING for replica in pool.replicas))
        assert [makers.living(index).served.count("admission") for index in range(2)] == [1, 1]

    run(makers, 2, work)


def test_an_engine_with_other_weights_than_the_latest_is_refused() -> None:
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        makers.living(1).keeps_version = True
        with raises(GenerationError, "replica 1", "(0, 0)", "version is 1"):
            await pool.load_weights(WEIGHTS, 1)
        assert pool.replicas[1].state is ReplicaState.FENCED

    run(makers, 2, work)


def test_the_kept_weights_are_those_of_the_last_weight_sync() -> None:
    kept = PublishedWeights()
    assert kept.tensors() == [] and kept.whole
    mine = torch.ones(3)
    kept.begin()
    assert not kept.whole
    kept.add([("a", mine)])
    kept.add([("b", torch.zeros(2))])
    kept.finish(1)
    mine.fill_(7)
    assert {name: t.tolist() for name, t in kept.tensors()} == {"a": [1.0] * 3, "b": [0.0] * 2}, "a copy"
    kept.begin()
    kept.finish(2)
    assert kept.version == 2 and len(kept.tensors()) == 2, "nothing came: the same weights under another number"
    kept.begin()
    kept.add([("a", mine)])
    kept.begin()  # that publication failed
    kept.add([("b", mine)])
    kept.finish(3)
    assert {name: t.tolist() for name, t in kept.tensors()} == {"b": [7.0] * 3}


def test_weights_are_kept_in_the_served_dtype() -> None:
    kept = PublishedWeights()
    kept.dtype = torch.bfloat16
    kept.add([("a", torch.tensor([1.0, 1.001])), ("positions", torch.arange(2))])
    assert kept.tensors()[0][1].tolist() == [1.0, 1.0], "1.001 is nearer to 1 than to the next number of bfloat16"
    assert [t.dtype for _, t in kept.tensors()] == [torch.bfloat16, torch.int64]
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        await pool.load_weights(WEIGHTS, 1)
        assert {t.dtype for _, t in pool._supervisor.weights.tensors()} == {torch.float32}, (
            "what these engines compute in"
        )

    run(makers, 2, work)


def test_an_answer_during_a_busy_event_loop_is_in_time() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        answer = asyncio.ensure_future(within(0.05, loop.run_in_executor(None, time.sleep, 0.01)))
        await asyncio.sleep(0)
        time.sleep(0.2)
        await answer
        with pytest.raises(TimeoutError):
            await within(0.01, asyncio.sleep(10))

    asyncio.run(work())


def test_each_replica_reports_its_metrics() -> None:
    makers = Makers(seconds=0.02)

    async def work(pool: EnginePool) -> None:
        await collect(pool, [ask(number, tokens=5) for number in range(8)])
        first = await pool.take_metrics()
        assert [one["num_requests"] for one in first] == [4, 4] and [one["num_restarts"] for one in first] == [0, 0]
        for one in first:
            assert 0 < one["throughput"] < 4 * 5 / 0.02 and one["slowest_request"] >= 0.02 > one["queue_time"] >= 0
            assert one["cache_hit_rate"] == 0.25 and one["num_preemptions"] == 0 and "time_to_first_token" not in one
        makers.living(1).preemptions = 3
        second = await pool.take_metrics()
        assert [one["num_requests"] for one in second] == [0, 0] and "throughput" not in second[0]
        assert [one["num_preemptions"] for one in second] == [0, 3]
        assert pool.replicas[1].concurrency.limit < pool.replicas[0].concurrency.limit, "preemptions shrink the limit"

    run(makers, 2, work)


def test_a_replica_lost_during_a_weight_sync_is_fenced_until_it_has_all_weights() -> None:
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        await pool.load_weights(WEIGHTS[:100], 1, last=False)
        makers.living(1).dead = True
        await pool.load_weights(WEIGHTS[100:120], 1, last=False)
        await until(lambda: pool.replicas[1].starts == 2 and pool.replicas[1].state is ReplicaState.FENCED)
        await pool.load_weights(WEIGHTS[120:], 1)
        answers = await collect(pool, [ask(number) for number in range(6)])
        assert {c.weight_versions for c in answers} == {(1, 1)}
        await until(lambda: pool.replicas[1].state is ReplicaState.SERVING)
        assert makers.living(1).version == 1 and makers.living(1).life == 1
        await pool.load_weights(WEIGHTS, 2)
        assert {replica.state for replica in pool.replicas} == {ReplicaState.SERVING}
        answers = await collect(pool, [ask(number) for number in range(6)])
        assert {c.weight_versions for c in answers} == {(2, 2)} and makers.living(1).served.count("admission") == 2

    run(makers, 2, work)


def test_weights_that_engines_refuse_leave_them_fenced() -> None:
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        with raises(GenerationError, "of 150"):
            await pool.load_weights(WEIGHTS[:10], 1)
        assert {replica.state for replica in pool.replicas} == {ReplicaState.FENCED}
        with raises(GenerationError, "version 0"):
            await collect(pool, [ask(0)])
        for fake in makers.made:
            fake.arriving = 0
        await pool.load_weights(WEIGHTS, 1)
        assert len(await collect(pool, [ask(0)])) == 1

    run(makers, 2, work)


def test_when_no_replica_can_be_started_every_caller_gets_the_error() -> None:
    makers = Makers(fails=lambda index, life: life > 0)

    async def work(pool: EnginePool) -> None:
        for fake in makers.made:
            fake.dead = True
        with raises(ProcessError, "all 2 replicas", "replica 1: engine 1 does not start"):
            await collect(pool, [ask(0), ask(1)])
        with raises(ProcessError, "all 2 replicas"):
            await collect(pool, [ask(2)])

    run(makers, 2, work, limits=ServerPoolConfig(start_attempts=2, health_check_period=0.05))


def test_a_pool_whose_replicas_do_not_start_leaves_none_running() -> None:
    makers = Makers(fails=lambda index, life: index == 1)
    with raises(GenerationError, "engine 1"):
        EnginePool(makers, 3)
    assert all(fake.closed for fake in makers.made)


def test_a_drained_replica_finishes_and_gets_nothing_more_until_it_is_admitted() -> None:
    makers = Makers(seconds=0.2)

    async def work(pool: EnginePool) -> None:
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(4)]))
        await until(lambda: makers.living(0).under_way > 0)
        await pool.drain(0)
        assert makers.living(0).under_way == 0
        await asking
        before = len(makers.living(0).served)
        await collect(pool, [ask(number) for number in range(10, 14)])
        assert len(makers.living(0).served) == before
        pool.admit(0)
        await collect(pool, [ask(number) for number in range(20, 24)])
        assert len(makers.living(0).served) > before

    run(makers, 2, work)


def test_callers_wait_while_the_queue_is_full_and_abort_empties_it() -> None:
    makers = Makers(seconds=0.02)
    limits = ServerPoolConfig(max_queued_requests=4, health_check_period=60)

    async def work(pool: EnginePool) -> None:
        for replica in pool.replicas:
            replica.concurrency.limit = replica.concurrency.most = 1
        lengths = []

        async def watched(first: int) -> int:
            answers = 0
            async for _ in pool.generate([ask(number) for number in range(first, first + 3)]):
                lengths.append(len(pool._waiting))
                answers += 1
            return answers

        assert await asyncio.gather(*(watched(10 * k) for k in range(5))) == [3] * 5
        assert max(lengths) <= 4
        assert [fake.most for fake in makers.made] == [1, 1]
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(6)]))
        await until(lambda: len(pool._waiting) == 4)
        await pool.abort([f"r{number}" for number in range(6)])
        reasons = [completion.stop_reason for completion in await asking]
        assert reasons.count(StopReason.ABORTED) == 4 and reasons.count(StopReason.LENGTH) == 2

    run(makers, 2, work, limits=limits)


def test_a_caller_that_goes_away_takes_its_requests_with_it() -> None:
    makers = Makers(seconds=5)

    async def work(pool: EnginePool) -> None:
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(200)]))
        await until(lambda: makers.living(0).under_way > 0)
        asking.cancel()
        await until(lambda: all(not replica.under_way for replica in pool.replicas))
        assert not pool._waiting and all(not fake.under_way for fake in makers.made)

    run(makers, 2, work)


def test_concurrency_follows_the_pressure() -> None:
    limit = Concurrency(start=10, most=50)
    for _ in range(1000):
        limit.note(waited=0.0, lasted=1.0, under_way=limit.limit)
    assert limit.limit == 50, "no request waits: it grows"
    for _ in range(1000):
        limit.note(waited=0.6, lasted=1.0, under_way=limit.limit)
    assert limit.limit == 1, "all wait: it shrinks"
    idle = Concurrency(start=10)
    for _ in range(100):
        idle.note(waited=0.0, lasted=1.0, under_way=2)
    assert idle.limit == 10, "what is not used up does not grow"
    idle.note_preemptions(3)
    idle.note_preemptions(3)
    assert idle.limit == 8


def test_a_busy_caller_is_not_a_full_cache() -> None:
    """In asynchronous training the caller computes too, and reads an answer long after the engine has finished it."""
    replica = Replica(0, Concurrency(start=8))
    for queued, limit in ((0.0, 8), (0.3, 1)):
        for _ in range(200):
            answer = Completion("a", [1], [0.0], [0.0], StopReason.STOP, seconds=0.1, queued_seconds=queued)
            replica.note(answer, queued=0.0, lasted=5.0)
        assert replica.concurrency.limit == limit
    assert replica.take_metrics()["queue_time"] == pytest.approx(4.9), (
        "what users wait is measured with the caller's clock"
    )


@examples(25)
@given(seed=st.integers(0, 2**31), count=st.integers(1, 4), publishes=st.booleans())
def test_kills_at_random_moments_lose_and_double_nothing(seed: int, count: int, publishes: bool) -> None:
    makers, chance = Makers(seconds=0.002), random.Random(seed)

    async def work(pool: EnginePool) -> None:
        ended = False

        async def kill() -> None:
            for _ in range(8):
                await asyncio.sleep(chance.random() * 0.02)
                makers.living(chance.randrange(count)).dead = True
            nonlocal ended
            ended = True

        killing, number, answers = asyncio.ensure_future(kill()), 0, []
        while not ended:
            requests = [ask(number + k, session=str(k)) for k in range(chance.randint(1, 12))]
            number += len(requests)
            answers += await collect(pool, requests)
            if publishes:
                await pool.load_weights(WEIGHTS, pool.version + 1)
        await killing
        assert sorted(int(c.request_id[1:]) for c in answers) == list(range(number))
        assert all(c.token_ids == expected(ask(int(c.request_id[1:]))) for c in answers)

    run(
        makers,
        count,
        work,
        limits=ServerPoolConfig(max_attempts=100, health_check_period=0.05, health_check_timeout=5),
    )


class Comparing(Fake):
    """Records the number of changed elements per weight of each weight sync; None for weights that are new."""

    async def load_weights(self, weights: Iterable[Any], version: int, *, last: bool = True, since: Any = None) -> None:
        weights = list(weights)
        changes = [None if since is None else since.change(name, tensor).changed for name, tensor in weights]
        self.changes = [*getattr(self, "changes", []), (version, changes)]
        await super().load_weights(weights, version, last=last)


def test_replicas_get_the_changes_since_their_version():
    makers = Makers()
    makers.kind = Comparing
    first, second = WEIGHTS, [(name, tensor + (place < 3)) for place, (name, tensor) in enumerate(WEIGHTS)]
    changed, nothing = [1] * 3 + [0] * (len(WEIGHTS) - 3), [None] * len(WEIGHTS)

    async def work(pool: EnginePool) -> None:
        await pool.load_weights(first, 1)
        await pool.load_weights(second, 2)
        makers.living(1).dead = True
        await pool.load_weights(first, 3)  # replica 1 is lost here, and gets whole weights after its restart
        while pool.replicas[1].state is not ReplicaState.SERVING:
            await asyncio.sleep(0.01)
        await pool.load_weights(second, 4)
        assert makers.living(0).changes == [(1, nothing), (2, changed), (3, changed), (4, changed)]
        assert makers.living(1).life == 1 and makers.living(1).changes == [(3, nothing), (4, changed)]
        broken = [*second[:-1]]
        with raises(GenerationError, 149, 150):
            await pool.load_weights(broken, 5)
        for replica in makers.made:
            replica.arriving = 0
        await pool.load_weights(second, 6)
        assert makers.living(0).changes[-1] == makers.living(1).changes[-1] == (6, nothing), (
            "no whole version is before this"
        )

    run(makers, 2, work, delta=True)
