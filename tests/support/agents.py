"""An engine that says what a script tells it, and episodes played with it, for tests of agent loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from support.templates import tokenizer as template_tokenizer

from hone.agents.base import EpisodeContext
from hone.agents.player import Player
from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.data.chat import render_prompt
from hone.data.types import Sample, StopReason, Trajectory
from hone.generation.protocol import Completion, GenerationRequest, SamplingParams

Script = Callable[[str, int], str]
"""(name of the episode, number of its turn) to what the model says."""


class ScriptedEngine:
    """Says what the script tells it, a stop token behind it; remembers every request.

    Args:
        tokenizer: encodes what is said.
        script: what to say.
        versions: weight version that each turn reports.
    """

    def __init__(self, tokenizer: Any, script: Script, versions: Sequence[int] = (0,)) -> None:
        self.tokenizer, self.script, self.versions = tokenizer, script, versions
        self.requests: list[GenerationRequest] = []
        self.calls: list[int] = []
        self.ended: list[str] = []
        self.turns: dict[str, int] = {}

    async def generate(self, requests: Sequence[GenerationRequest]):
        self.calls.append(len(requests))
        for request in requests:
            self.requests.append(request)
            name = request.request_id.rpartition("/")[0]
            turn = self.turns[name] = self.turns.get(name, -1) + 1
            ids = self.tokenizer.encode(self.script(name, turn), add_special_tokens=False)
            ids = [*ids, self.tokenizer.eos_token_id]
            reason = StopReason.STOP
            if len(ids) > request.sampling.max_tokens:
                ids, reason = ids[: request.sampling.max_tokens], StopReason.LENGTH
            version = self.versions[min(turn, len(self.versions) - 1)]
            log_probs = [-0.25 * (number + 1) for number in range(len(ids))]
            yield Completion(request.request_id, ids, log_probs, log_probs, reason, (version, version))
            await asyncio.sleep(0)

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Nothing is under way for long."""

    async def end_sessions(self, sessions: Sequence[str]) -> None:
        self.ended += sessions


def call(name: str, **arguments: Any) -> str:
    """A tool call as Qwen writes it."""
    import json

    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def sample(question: str = "What is 6*7?", uid: str = "row", tools: Sequence[dict] = (), **extra: Any) -> Sample:
    """A dataset row, rendered as a run would."""
    messages = [{"role": "user", "content": question}]
    ids = render_prompt(template_tokenizer("qwen2_5"), messages, {"tools": list(tools)} if tools else None)
    agent = extra.pop("agent_name", None)
    return Sample(uid, ids, messages, "calculator", "42", extra, agent)


def setting(tools: Sequence[Any] = (), agent: dict[str, Any] | None = None, **multi_turn: Any) -> EpisodeContext:
    """A setting with these tools."""
    from hone.agents.tools.base import Toolbox

    several = MultiTurnConfig(**{"enable": True, **multi_turn})
    made = EpisodeContext(
        template_tokenizer("qwen2_5"), several, AgentConfig(**{"default_agent_loop": "tool_agent", **(agent or {})})
    )
    made.toolbox = Toolbox(tools, several)
    return made


def play(
    made: EpisodeContext,
    script: Script,
    samples: Sequence[Sample],
    *,
    n: int = 1,
    max_tokens: int = 400,
    engine_type: type[ScriptedEngine] = ScriptedEngine,
) -> tuple[list[Trajectory], ScriptedEngine]:
    """Play the samples; returns the trajectories and the engine."""
    engine = engine_type(made.tokenizer, script)
    player = Player(engine, made)  # type: ignore[arg-type]
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=(made.tokenizer.eos_token_id,))
    seeds = {(s.uid, index): number for number, (s, index) in enumerate((s, i) for s in samples for i in range(n))}
    played = asyncio.run(player.play(samples, sampling, n=n, seed_of=lambda uid, index: seeds[uid, index]))
    return played, engine
