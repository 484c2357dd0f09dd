"""Endpoint of a training run; every episode has its session, bounded by the episode's limits."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from hone.agents.client import EngineClient
from hone.agents.context import EpisodeContext
from hone.errors import ConfigError
from hone.insight.audit import AuditLog

if TYPE_CHECKING:
    from hone.agents.episode import Episode
    from hone.agents.serving.session import Prompt, Session

MODEL = "policy"
"""Model name of the trained policy in agents' requests."""


class TrainingEndpoint:
    """Server of the policy for the agents of a run, on loopback.

    Replies use the run's sampling parameters, not those of requests: the trainer's log-probs assume the run's temperature.
    """

    def __init__(self, context: EpisodeContext, client: EngineClient) -> None:
        try:
            from hone.agents.serving.app import Endpoint
            from hone.agents.serving.gateway import Gateway
            from hone.agents.serving.server import HttpServer
            from hone.agents.serving.service import Service
            from hone.agents.serving.session import Sessions
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"agents that are programs need the package '{error.name}', which is not installed",
                fix='pip install "hone-rl[serve]"',
            ) from error
        self._context = context
        self._gateway = Gateway(client, asyncio.get_running_loop())
        self._service = Service(
            model=MODEL,
            tokenizer=context.tokenizer,
            gateway=self._gateway,
            max_model_len=context.max_model_len or 2**31,
            renderer=context.multi_turn.renderer,
            parser=context.multi_turn.format,
            template_kwargs=context.template_kwargs,
            standalone=False,
            audit=AuditLog(folder) if (folder := context.multi_turn.audit_dir) is not None else None,
        )
        self._sessions = Sessions(max_sessions=2**31, named_by_path=False)
        endpoint = Endpoint(self._service, token=secrets.token_urlsafe(24), sessions=self._sessions)
        self._server = HttpServer(endpoint.app)
        self._server.start()
        self.url = f"{self._server.url}/v1"  # value of ``OPENAI_BASE_URL``

    def open(self, episode: Episode) -> Session:
        self._gateway.loop = asyncio.get_running_loop()
        name = f"{episode.name}@{secrets.token_hex(4)}"
        session = self._sessions.open(name, seed=episode.seed, sampling=episode.sampling)
        session.allow = lambda prompt: reply_budget(session, episode, prompt)
        return session

    async def close(self, session: Session) -> None:
        self._sessions.close(session)
        await self._gateway.client.end_sessions([session.name])

    def stop(self) -> None:
        self._server.stop()


def reply_budget(session: Session, episode: Episode, prompt: Prompt) -> int:
    """Return the maximum tokens of a reply within the episode's remaining limits.

    Raises:
        ApiError: no tokens or turns are left; the call is counted as ``refused``.
    """
    from hone.agents.serving.errors import ApiError

    limits = episode.budget.limits
    used = sum(len(turn.completion.token_ids) + (len(turn.given_ids) if turn.parent else 0) for turn in session.turns)
    left = limits.tokens - used - (len(prompt.given_ids) if prompt.parent else 0)
    turns = limits.assistant_turns
    if left < 1 or (turns is not None and len(session.turns) >= turns):
        session.counts["refused"] += 1
        limit = f"{limits.tokens} tokens" if left < 1 else f"{turns} turns"
        # clients recognise the end of a conversation by this text
        message = f"this model's maximum context length is reached: the episode has used up its {limit}"
        raise ApiError(400, message, code="context_length_exceeded", param="messages")
    return min(left, episode.sampling.max_tokens)
