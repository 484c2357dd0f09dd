"""Replicas that join and leave a pool under load, during weight syncs, pauses and losses."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.patience import SOON
from support.pools import WEIGHTS, Fake, Makers, ask, collect, expected, run, until

from hone.config.engines import ServerPoolConfig
from hone.errors import ProcessError
from hone.generation.pool import EnginePool, ReplicaState


def serving(pool: EnginePool) -> list[int]:
    return [replica.index for replica in pool.replicas if replica.serves]


def check_answers(answers: list[Any], count: int) -> None:
    assert sorted(int(answer.request_id[1:]) for answer in answers) == list(range(count))
    assert all(answer.token_ids == expected(ask(int(answer.request_id[1:]))) for answer in answers)


def test_replicas_that_join_under_load_serve_the_latest_weights() -> None:
    makers = Makers(seconds=0.02)

    async def work(pool: EnginePool) -> None:
        for replica in pool.replicas:
            replica.concurrency.limit = replica.concurrency.most = 4
        await pool.load_weights(WEIGHTS, 1)
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(200)]))
        await until(lambda: makers.living(0).under_way > 0)
        pool.resize(3)
        assert len(pool.replicas) == 3 and serving(pool) == [0], "the call does not wait"
        answers = await asking
        check_answers(answers, 200)
        assert {answer.weight_versions for answer in answers} == {(1, 1)}
        for index in (1, 2):
            assert len(makers.living(index).served) > 10 and makers.living(index).served[0] == "admission"
        await pool.load_weights(WEIGHTS, 2)
        assert [fake.version for fake in makers.made] == [2, 2, 2]
        assert len(await pool.take_metrics()) == 3

    run(makers, 1, work)


def test_replicas_that_leave_finish_their_requests_and_get_none_more() -> None:
    makers = Makers(seconds=0.3)

    async def work(pool: EnginePool) -> None:
        sessions = {f"r{number}": f"episode {number}" for number in range(30)}
        first = [ask(number, session=sessions[f"r{number}"]) for number in range(30)]
        asking = asyncio.ensure_future(collect(pool, first))
        await until(lambda: all(fake.under_way == 10 for fake in makers.made))
        leaving = makers.made[1:]
        pool.resize(1)
        later = asyncio.ensure_future(collect(pool, [ask(n + 30, session=f"episode {n}") for n in range(30)]))
        check_answers([*await asking, *await later], 60)
        assert [len(fake.served) for fake in leaving] == [10, 10], "their episodes continue elsewhere"
        assert sum(replica.window.retried for replica in pool.replicas) == 0
        await until(lambda: len(pool.replicas) == 1)
        assert all(fake.closed for fake in leaving) and not makers.made[0].closed
        pool.resize(2)
        await until(lambda: serving(pool) == [0, 1])
        assert makers.living(1) not in leaving

    run(makers, 3, work)


def test_a_replica_that_is_wanted_again_while_it_drains_keeps_its_engine() -> None:
    makers = Makers(seconds=0.5)

    async def work(pool: EnginePool) -> None:
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(8)]))
        await until(lambda: makers.living(1).under_way > 0)
        pool.resize(1)
        assert serving(pool) == [0] and pool.replicas[1].report()["state"] == "draining"
        pool.resize(2)
        assert serving(pool) == [0, 1]
        check_answers(await asking, 8)
        await asyncio.sleep(0.1)
        assert len(makers.made) == 2 and not makers.living(1).closed

    run(makers, 2, work)


def test_replicas_join_and_leave_in_the_middle_of_a_weight_sync() -> None:
    makers = Makers()

    async def work(pool: EnginePool) -> None:
        await pool.pause()
        await pool.load_weights(WEIGHTS[:100], 1, last=False)
        pool.resize(3)
        await until(lambda: [replica.state for replica in pool.replicas] == [ReplicaState.FENCED] * 3)
        await pool.load_weights(WEIGHTS[100:], 1)
        await pool.resume()
        await until(lambda: serving(pool) == [0, 1, 2])
        assert [fake.version for fake in makers.made] == [1, 1, 1]
        await pool.pause()
        await pool.load_weights(WEIGHTS[:100], 2, last=False)
        pool.resize(1)
        await asyncio.sleep(0.1)
        assert len(pool.replicas) == 3, "a fenced replica leaves after the weight sync"
        await pool.load_weights(WEIGHTS[100:], 2)
        await pool.resume()
        answers = await collect(pool, [ask(number) for number in range(6)])
        assert {answer.weight_versions for answer in answers} == {(2, 2)}
        await until(lambda: len(pool.replicas) == 1)

    run(makers, 2, work)


def test_a_replica_that_cannot_start_is_given_up_and_tried_again() -> None:
    broken = {1}
    makers = Makers(fails=lambda index, life: index in broken)
    limits = ServerPoolConfig(start_attempts=2, health_check_period=0.05)

    async def work(pool: EnginePool) -> None:
        pool.resize(2)
        await until(lambda: pool.replicas[1].state is ReplicaState.LOST)
        assert "engine 1" in pool.replicas[1].report()["problem"] and makers.tries[1] == 1
        check_answers(await collect(pool, [ask(number) for number in range(6)]), 6)
        broken.clear()
        pool.resize(2)
        await until(lambda: serving(pool) == [0, 1])
        assert not pool.replicas[1].problem

    run(makers, 1, work, limits=limits)


def test_a_replica_leaves_only_while_another_can_serve() -> None:
    broken: set[int] = set()
    makers = Makers(fails=lambda index, life: index in broken)

    async def work(pool: EnginePool) -> None:
        broken.add(0)
        makers.living(0).dead = True
        check_answers(await collect(pool, [ask(number) for number in range(6)]), 6)
        pool.resize(1)
        check_answers(await collect(pool, [ask(number) for number in range(6)]), 6)
        assert len(makers.living(1).served) >= 6
        broken.clear()
        await until(lambda: serving(pool) == [0] and len(pool.replicas) == 1)
        assert makers.living(1).closed

    limits = ServerPoolConfig(start_attempts=100, health_check_period=0.05)
    run(makers, 2, work, limits=limits)


def test_a_replica_that_leaves_while_it_starts_is_closed() -> None:
    go_on = threading.Event()

    class Slow(Makers):
        def __call__(self, index: int) -> Fake:
            if index == 1:
                assert go_on.wait(SOON)
            return super().__call__(index)

    makers = Slow()

    async def work(pool: EnginePool) -> None:
        pool.resize(2)
        await asyncio.sleep(0.05)
        pool.resize(1)
        check_answers(await collect(pool, [ask(number) for number in range(4)]), 4)
        go_on.set()
        await until(lambda: len(pool.replicas) == 1)
        assert makers.living(1).closed and makers.living(1).served in ([], ["admission"])

    run(makers, 1, work)


def test_a_pool_that_closes_while_replicas_join_and_leave_leaves_none_running() -> None:
    makers = Makers(seconds=0.3)

    async def work(pool: EnginePool) -> None:
        asking = asyncio.ensure_future(collect(pool, [ask(number) for number in range(40)]))
        await until(lambda: makers.living(2).under_way > 0)
        pool.resize(5)
        pool.resize(1)
        pool.resize(4)
        asking.cancel()

    run(makers, 3, work)


def test_a_replica_that_comes_and_goes_while_the_one_before_it_ends_is_closed() -> None:
    """The surplus that was ended is taken out of the pool, not the one that came after it."""
    closing, may_close = threading.Event(), threading.Event()

    class SlowToClose(Fake):
        def close(self) -> None:
            if self.index == 1:
                closing.set()
                may_close.wait(SOON)
            super().close()

    class SlowMakers(Makers):
        kind = SlowToClose

    makers = SlowMakers()

    async def work(pool: EnginePool) -> None:
        pool.resize(1)
        await until(closing.is_set)
        pool.resize(3)
        await until(lambda: any(fake.index == 2 for fake in makers.made))
        pool.resize(1)
        may_close.set()
        await until(lambda: len(pool.replicas) == 1)
        await until(lambda: [fake.index for fake in makers.made if not fake.closed] == [0])

    run(makers, 2, work)


def test_a_pool_has_at_least_one_replica() -> None:
    async def work(pool: EnginePool) -> None:
        with pytest.raises(ValueError, match="0"):
            pool.resize(0)
        assert pool.count == len(pool.replicas) == 1

    run(Makers(), 1, work)


@examples(25)
@given(seed=st.integers(0, 2**31), publishes=st.booleans())
def test_random_sizes_kills_and_weight_syncs_lose_and_double_nothing(seed: int, publishes: bool) -> None:
    makers, chance = Makers(seconds=0.002), random.Random(seed)

    async def work(pool: EnginePool) -> None:
        async def disturb() -> None:
            for _ in range(12):
                await asyncio.sleep(chance.random() * 0.015)
                if chance.random() < 0.6:
                    pool.resize(chance.randint(1, 4))
                else:
                    chance.choice(makers.made).dead = True

        disturbing, number, answers = asyncio.ensure_future(disturb()), 0, []
        while not disturbing.done():
            requests = [ask(number + k, session=str(k)) for k in range(chance.randint(1, 12))]
            number += len(requests)
            version = pool.version
            batch = await collect(pool, requests)
            assert {answer.weight_versions for answer in batch} == {(version, version)}
            answers += batch
            if publishes and chance.random() < 0.5:
                await pool.pause()
                await pool.load_weights(WEIGHTS[:70], version + 1, last=False)
                await asyncio.sleep(chance.random() * 0.01)
                await pool.load_weights(WEIGHTS[70:], version + 1)
                await pool.resume()
        await disturbing
        check_answers(answers, number)
        await until(lambda: serving(pool) == list(range(pool.count)) and len(pool.replicas) == pool.count)
        # one engine each, and no other; that of a replica which has left may still close in its thread
        await until(lambda: sorted(fake.index for fake in makers.made if not fake.closed) == list(range(pool.count)))

    limits = ServerPoolConfig(max_attempts=100, start_attempts=100, health_check_period=0.05, health_check_timeout=5)
    run(makers, 2, work, limits=limits)


def test_when_no_replica_of_a_smaller_pool_starts_every_caller_gets_the_error() -> None:
    makers = Makers(fails=lambda index, life: life > 0)
    limits = ServerPoolConfig(start_attempts=2, health_check_period=0.05)

    async def work(pool: EnginePool) -> None:
        pool.resize(1)
        await until(lambda: len(pool.replicas) == 1)
        makers.living(0).dead = True
        with pytest.raises(ProcessError):
            await collect(pool, [ask(0)])

    run(makers, 2, work, limits=limits)


def test_a_replica_that_is_overtaken_by_new_weights_gets_them_before_it_serves() -> None:
    makers = Makers(seconds=0.3)

    async def work(pool: EnginePool) -> None:
        await pool.load_weights(WEIGHTS, 1)
        pool.resize(2)
        await until(lambda: len(makers.made) == 2 and makers.living(1).under_way == 1)
        await pool.load_weights(WEIGHTS[:100], 2, last=False)
        await until(lambda: makers.living(1).served == ["admission"])
        assert serving(pool) == []
        await pool.load_weights(WEIGHTS[100:], 2)
        await until(lambda: serving(pool) == [0, 1])
        assert makers.living(1).version == 2 and makers.living(1).served == ["admission"] * 2

    run(makers, 1, work)
