"""A player of episodes of the library verifiers, with a scripted engine in place of a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from support.scripted import ScriptedEngine
from support.templates import tokenizer

from hone.agents.base import EpisodeContext
from hone.agents.player import Player
from hone.agents.rendering import renderer_for
from hone.config.agents import AgentConfig, MultiTurnConfig, VerifiersConfig
from hone.data.tasks.base import Problem
from hone.data.types import Sample, Trajectory
from hone.generation.protocol import SamplingParams

TOKENIZER = tokenizer("qwen2_5")
Script = Callable[[Any], list[int]]


def ids(text: str) -> list[int]:
    return TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"]


def sample(problem: Problem) -> Sample:
    assert problem.prompt is not None
    prompt = renderer_for(TOKENIZER).prompt(problem.prompt)
    return Sample(
        str(problem.key), prompt, problem.prompt, "verifiers/x", problem.ground_truth, problem.extra, "verifiers"
    )


class World:
    """One player, and so one process of verifiers', for all tests."""

    def __init__(self, python: str) -> None:
        self.engine = ScriptedEngine(lambda request: [])
        agent = AgentConfig(verifiers=VerifiersConfig(python=python, timeout=200), on_error="drop", max_retries=0)
        self.context = EpisodeContext(TOKENIZER, MultiTurnConfig(enable=True), agent, max_model_len=4096)
        self.player = Player(self.engine, self.context)  # type: ignore[arg-type]

    def play(self, script: Script, problems: list[Problem], tokens: int = 400) -> list[Trajectory]:
        self.engine.script, self.engine.asked = script, []
        sampling = SamplingParams(max_tokens=tokens, temperature=0.7)
        rows = [sample(problem) for problem in problems]
        playing = self.player.play(rows, sampling, n=1, seed_of=lambda uid, index: hash(uid) % 2**31)
        return asyncio.run(asyncio.wait_for(playing, 250))
