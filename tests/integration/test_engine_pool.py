"""A pool of real engine processes: twenty kills at random moments, and weights that come back with a replica."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
from support.templates import tokenizer
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hone.generation.pool import EnginePool, PoolLimits, ReplicaState
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine

pytestmark = pytest.mark.slow
KILLS = 20
SAMPLING = SamplingParams(max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, known = tmp_path_factory.mktemp("pool"), tokenizer("qwen2_5")
    config = Qwen3Config(
        vocab_size=len(known),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    known.save_pretrained(folder)
    return folder


def start(model: Path, log: Path) -> ServedEngine:
    return ServedEngine.start(
        LaunchPlan(
            engine="native",
            python=sys.executable,
            model=str(model),
            tokenizer=str(model),
            dtype="float32",
            max_num_seqs=16,
            max_model_len=256,
            log=log,
        )
    )


def request(number: int) -> GenerationRequest:
    return GenerationRequest(f"r{number}", [5, 6, 7 + number % 50], SAMPLING, seed=number, session=f"e{number % 7}")


def pid_of(pool: EnginePool, index: int) -> int:
    engine = pool.replicas[index].engine
    assert isinstance(engine, ServedEngine) and engine.process is not None
    return engine.process.pid


@pytest.mark.timeout(600)
def test_twenty_kills_at_random_moments_lose_and_double_nothing(model: Path, tmp_path: Path) -> None:
    chance, started = random.Random(0), []

    def begin(index: int) -> ServedEngine:
        engine = start(model, tmp_path / f"{index}.log")
        assert engine.process is not None
        started.append(engine.process.pid)
        return engine

    weights = [
        (name, tensor.detach() * 2) for name, tensor in AutoModelForCausalLM.from_pretrained(model).named_parameters()
    ]
    limits = PoolLimits(attempts=1000, probe_seconds=0.5, answer_seconds=60)
    pool = EnginePool(begin, 3, limits=limits, refill=lambda: weights)

    async def work() -> dict[str, Completion]:
        await pool.load_weights(weights, 1)
        found: dict[str, Completion] = {}
        counts: Counter[str] = Counter()
        numbers = iter(range(10**9))
        killing = asyncio.ensure_future(kill())

        async def caller() -> None:
            while not killing.done():
                asked = [request(next(numbers)) for _ in range(8)]
                async for completion in pool.generate(asked):
                    counts[completion.request_id] += 1
                    found[completion.request_id] = completion

        await asyncio.gather(*(caller() for _ in range(4)))
        await killing
        assert set(counts) == {f"r{number}" for number in range(next(numbers))} and set(counts.values()) == {1}
        return found

    async def kill() -> None:
        for _ in range(KILLS):
            await asyncio.sleep(chance.random())
            while not (serving := [r.index for r in pool.replicas if r.state is ReplicaState.SERVING]):
                await asyncio.sleep(0.05)
            os.killpg(pid_of(pool, chance.choice(serving)), signal.SIGKILL)
            if chance.random() < 0.5:  # and at times the next one at once
                await asyncio.sleep(0)

    async def undisturbed(names: list[str]) -> dict[str, list[int]]:
        return {c.request_id: c.token_ids async for c in pool.generate([request(int(name[1:])) for name in names])}

    try:
        found = asyncio.run(asyncio.wait_for(work(), 500))
        assert len(started) >= 3 + KILLS - 2, "replicas were started again"
        assert {completion.weight_versions for completion in found.values()} == {(1, 1)}
        some = chance.sample(sorted(found), min(40, len(found)))
        assert asyncio.run(undisturbed(some)) == {name: found[name].token_ids for name in some}
        assert sum(replica.retried for replica in pool.replicas) > 0, "requests were under way when replicas died"
    finally:
        pool.close()
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_stopped_replica_is_found_and_replaced(model: Path, tmp_path: Path) -> None:
    limits = PoolLimits(probe_seconds=0.2, answer_seconds=3)
    pool = EnginePool(lambda index: start(model, tmp_path / f"{index}.log"), 1, limits=limits)

    async def work() -> None:
        os.killpg(pid_of(pool, 0), signal.SIGSTOP)
        found = [completion async for completion in pool.generate([request(number) for number in range(20)])]
        assert len(found) == 20 and pool.replicas[0].starts == 2

    try:
        asyncio.run(asyncio.wait_for(work(), 100))
    finally:
        pool.close()
