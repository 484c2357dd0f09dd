"""The endpoint of a training run: every episode has a session of its own, under the limits of the episode."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING

from hone.agents.client import EngineClient
from hone.agents.setting import Setting
from hone.errors import ConfigError

if TYPE_CHECKING:
    from hone.agents.episode import Episode
    from hone.agents.serving.session import Prompt, Session

MODEL = "policy"
"""Name under which agents ask for the model that is trained."""


class TrainingEndpoint:
    """Serves the policy to the agents of a run, on loopback.

    Replies are drawn as the run says, whatever temperature an agent asks for: the trainer's log-probs are of that temperature.

    Args:
        setting: what the episodes share.
        client: asks the engine.

    Attributes:
        url: for ``OPENAI_BASE_URL``.
    """

    def __init__(self, setting: Setting, client: EngineClient) -> None:
        try:
            from hone.agents.serving.app import Endpoint
            from hone.agents.serving.asking import Service
            from hone.agents.serving.gateway import Gateway
            from hone.agents.serving.server import HttpServer
            from hone.agents.serving.sessions import Sessions
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"agents that are programs need the package '{error.name}', which is not installed",
                fix='pip install "hone-rl[serve]"',
            ) from error
        self._setting = setting
        self._gateway = Gateway(client, asyncio.get_running_loop())
        self._service = Service(
            model=MODEL,
            tokenizer=setting.tokenizer,
            gateway=self._gateway,
            max_model_len=setting.context or 2**31,
            renderer=setting.multi_turn.renderer,
            parser=setting.multi_turn.format,
            template_kwargs=setting.template_kwargs,
        )
        self._sessions = Sessions(most=2**31, named_by_path=False)
        endpoint = Endpoint(self._service, token=secrets.token_urlsafe(24), sessions=self._sessions)
        self._server = HttpServer(endpoint.app)
        self._server.start()
        self.url = f"{self._server.url}/v1"

    def open(self, episode: Episode) -> Session:
        """A session for an episode."""
        self._gateway.loop = asyncio.get_running_loop()
        name = f"{episode.name}@{secrets.token_hex(4)}"
        session = self._sessions.open(name, seed=episode.seed, sampling=episode.sampling)
        session.allow = lambda prompt: allowed(session, episode, prompt)
        return session

    async def close(self, session: Session) -> None:
        """The episode is over: its key opens nothing any more."""
        self._sessions.close(session)
        await self._gateway.client.end_sessions([session.name])

    def stop(self) -> None:
        """End the server."""
        self._server.stop()


def allowed(session: Session, episode: Episode, prompt: Prompt) -> int:
    """Most tokens of the reply to a prompt, within what is left of the episode's limits.

    Raises:
        ApiError: nothing is left. It is counted as ``refused``.
    """
    from hone.agents.serving.errors import ApiError

    limits = episode.budget.limits
    used = sum(len(turn.completion.token_ids) + (len(turn.given_ids) if turn.parent else 0) for turn in session.turns)
    left = limits.tokens - used - (len(prompt.given_ids) if prompt.parent else 0)
    turns = limits.assistant_turns
    if left < 1 or (turns is not None and len(session.turns) >= turns):
        session.counts["refused"] += 1
        what = f"{limits.tokens} tokens" if left < 1 else f"{turns} turns"
        # the words by which clients tell that a conversation is over from a request that is wrong
        said = f"this model's maximum context length is reached: the episode has used up its {what}"
        raise ApiError(400, said, code="context_length_exceeded", param="messages")
    return min(left, episode.sampling.max_tokens)
