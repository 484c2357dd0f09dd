"""A pool over a real engine process that hangs. Replicas that are killed: tests/e2e/test_lost_replicas.py."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from support.patience import LONG
from support.templates import tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

from hone.config.engines import ServerPoolConfig
from hone.generation.pool import EnginePool
from hone.generation.protocol import GenerationRequest, SamplingParams
from hone.generation.remote import LaunchPlan, ServedEngine

pytestmark = pytest.mark.long("hone/generation/pool")
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


def test_a_stopped_replica_is_found_and_replaced(model: Path, tmp_path: Path) -> None:
    limits = ServerPoolConfig(health_check_period=0.2, health_check_timeout=12)  # a living one is slow on busy cores
    pool = EnginePool(lambda index: start(model, tmp_path / f"{index}.log"), 1, limits=limits)

    async def work() -> None:
        os.killpg(pid_of(pool, 0), signal.SIGSTOP)
        found = [completion async for completion in pool.generate([request(number) for number in range(20)])]
        assert len(found) == 20 and pool.replicas[0].starts == 2

    try:
        asyncio.run(asyncio.wait_for(work(), LONG))
    finally:
        pool.close()
