"""Episodes of programs that use the endpoint of a run, over an engine of a test."""

from __future__ import annotations

import asyncio
from typing import Any

from support.patience import LONG
from support.templates import tokenizer

from hone.agents.base import EpisodeContext
from hone.agents.player import Player
from hone.config.agents import AgentConfig, MultiTurnConfig, ProgramConfig
from hone.data.types import Sample, Trajectory
from hone.generation.protocol import SamplingParams

TOKENIZER = tokenizer("qwen2_5")


def play(engine: Any, samples: list[Sample], n: int = 1, tokens: int = 400, **program: Any) -> list[Trajectory]:
    """Play ``n`` episodes of each sample by a command or a function."""
    agent = AgentConfig(program=ProgramConfig(**program), on_error="drop", max_retries=0)
    turns = MultiTurnConfig(enable=True)
    player = Player(engine, EpisodeContext(TOKENIZER, turns, agent, max_model_len=4096))
    sampling = SamplingParams(max_tokens=tokens, temperature=0.7)
    playing = player.play(samples, sampling, n=n, seed_of=lambda uid, index: hash((uid, index)) % 2**31)
    return asyncio.run(asyncio.wait_for(playing, LONG))
