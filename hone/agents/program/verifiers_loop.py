"""Agent loop ``verifiers``: environments of the library verifiers, run in the Python environment where they are installed.

They request the model through the run's endpoint, so their conversations are recorded as exact tokens; turns, tools and rewards are
theirs. Dependencies stay separate from Hone's: one process with their interpreter plays all episodes of a rollout worker.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hone.agents.base import AGENT_LOOPS
from hone.agents.episode import Episode
from hone.agents.program.bridge import Bridge, verifiers_bridge
from hone.agents.program.loop import EndpointLoop
from hone.agents.program.process import MODEL, ProgramFailed, ProgramOutcome
from hone.errors import DataError

PYTHON = "actor_rollout_ref.rollout.agent.verifiers.python"


@AGENT_LOOPS.register("verifiers")
class VerifiersLoop(EndpointLoop):
    """Loop for the environment in a row's ``extra_info.verifiers``, as `hone data make verifiers:NAME` writes it."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._config = context.agent.verifiers
        self._bridge: Bridge | None = None

    @property
    def timeout(self) -> float:
        return self._config.timeout

    async def run(self, episode: Episode, *, base_url: str, api_key: str) -> ProgramOutcome:
        spec = _spec_of(episode)
        answer = await asyncio.wrap_future(
            self._running().ask("play", **spec, base_url=base_url, api_key=api_key, model=MODEL)
        )
        if answer["error"] is not None and not answer["by_model"]:
            raise ProgramFailed(f"verifiers' rollout failed: {answer['error']}")
        return ProgramOutcome(reward=float(answer["reward"] or 0.0), facts=answer["facts"])

    def _running(self) -> Bridge:
        if self._bridge is None or not self._bridge.alive:
            if self._bridge is None:
                self.context.at_end.append(lambda: self._bridge.close() if self._bridge else None)
            self._bridge = verifiers_bridge(self._config.python, PYTHON)
        return self._bridge


def _spec_of(episode: Episode) -> dict[str, Any]:
    spec: Any = episode.sample.extra_info.get("verifiers")
    try:
        return {
            "environment": spec["environment"],
            "arguments": json.loads(spec["arguments"]),
            "row": json.loads(spec["row"]),
        }
    except (TypeError, KeyError, ValueError) as error:
        raise DataError(
            f"row {episode.sample.uid} has no valid extra_info.verifiers: {spec!r:.100}",
            fix="make the dataset with `hone data make verifiers:NAME`",
            where="extra_info.verifiers",
        ) from error
