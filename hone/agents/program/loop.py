"""Agent loop ``program``: an episode is one run of a program that uses the run's endpoint."""

from __future__ import annotations

import asyncio
import functools
import inspect
import secrets
import sys
from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hone.agents.base import AGENT_LOOPS, AgentLoop, EpisodeContext
from hone.agents.episode import BudgetSpent, EngineClient, Episode
from hone.agents.program.process import MODEL, ProgramFailed, ProgramOutcome, run_program
from hone.data.episode_log import EpisodeEnd
from hone.errors import ConfigError
from hone.extras import install_command
from hone.insight.audit import AuditLog
from hone.registry import imported

if TYPE_CHECKING:
    from hone.agents.serving.app import Endpoint
    from hone.agents.serving.server import HttpServer
    from hone.agents.serving.session import Prompt, Session


def serve_policy(
    context: EpisodeContext, client: EngineClient, *, token: str | None, **service: Any
) -> tuple[Endpoint, HttpServer]:
    """Start a server of the policy on loopback; its engine's loop is the running one.

    ``service``: further arguments of :class:`~hone.agents.serving.service.Service`.
    """
    try:
        from hone.agents.serving.app import Endpoint
        from hone.agents.serving.gateway import Gateway
        from hone.agents.serving.server import HttpServer
        from hone.agents.serving.service import Service
        from hone.agents.serving.session import Sessions
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the policy's endpoint needs the package '{error.name}', which is not installed",
            why="agents that are programs, and suites of other packages, send requests to it",
            fix=install_command("serve"),
        ) from error
    policy = Service(
        model=MODEL,
        tokenizer=context.tokenizer,
        gateway=Gateway(client, asyncio.get_running_loop()),
        max_model_len=context.max_model_len or 2**31,
        renderer=context.multi_turn.renderer,
        parser=context.multi_turn.format,
        template_kwargs=context.template_kwargs,
        standalone=False,
        **service,
    )
    endpoint = Endpoint(policy, token=token, sessions=Sessions(max_sessions=2**31, named_by_path=False))
    server = HttpServer(endpoint.app)
    server.start()
    return endpoint, server


class TrainingEndpoint:
    """Server of the policy for the agents of a run, on loopback.

    Replies use the run's sampling parameters, not those of requests: the trainer's log-probs assume the run's temperature.
    """

    def __init__(self, context: EpisodeContext, client: EngineClient) -> None:
        folder = context.multi_turn.audit_dir
        audit = AuditLog(folder) if folder is not None else None
        endpoint, self._server = serve_policy(context, client, token=secrets.token_urlsafe(24), audit=audit)
        self._gateway, self._sessions = endpoint.services.current.gateway, endpoint.sessions
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


class EndpointLoop(AgentLoop):
    """Loop that gives every episode a session on an endpoint, runs the agent, and keeps the sampled tokens.

    The agent builds its prompts and executes its tools. Each of its calls is recorded as the tokens that the model received and
    sampled. A conversation becomes one trajectory; further conversations and rewritten histories become segments of the episode.
    """

    gives_reward = True

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._endpoint: TrainingEndpoint | None = None

    @property
    @abstractmethod
    def timeout(self) -> float:
        """Seconds that an episode may take, a positive number."""

    @abstractmethod
    async def run(self, episode: Episode, *, base_url: str, api_key: str) -> ProgramOutcome:
        """Run the agent of an episode with this endpoint and the key of the episode's session."""

    async def play(self, episode: Episode) -> None:
        """Run the agent; keep the recorded tokens and the agent's outcome."""
        if self._endpoint is None:
            self._endpoint = TrainingEndpoint(self.context, episode.client)
            self.context.at_end.append(self._endpoint.stop)
        endpoint = self._endpoint
        session = endpoint.open(episode)
        try:
            outcome = await episode.outside(self.run(episode, base_url=endpoint.url, api_key=session.key), self.timeout)
        except TimeoutError:
            raise ProgramFailed(f"the agent took more than {self.timeout:g} s") from None
        except ProgramFailed:
            if not session.counts["refused"]:
                raise
            outcome = ProgramOutcome(reward=0.0)  # the agent failed because a limit refused its call
        finally:
            await endpoint.close(session)
            record_session(session, episode)
        if not session.turns:
            raise ProgramFailed("the agent ended without a request to the model")
        episode.log.reward, episode.answer = outcome.reward, outcome.text
        episode.log.facts |= outcome.facts
        if session.counts["refused"]:
            raise BudgetSpent(EpisodeEnd.TOKENS)


def row_of(episode: Episode) -> dict[str, Any]:
    """Return the input of an agent: its dataset row, index and seed."""
    sample = episode.sample
    return {
        "uid": sample.uid,
        "index": episode.index,
        "seed": episode.seed,
        "messages": sample.messages or [],
        "data_source": sample.data_source,
        "ground_truth": sample.ground_truth,
        "extra_info": sample.extra_info,
    }


def record_session(session: Session, episode: Episode) -> None:
    """Copy a session's record into the episode: its conversations become the segments."""
    ledgers = session.ledgers()
    if not ledgers:
        return
    episode.adopt(ledgers)
    last = session.turns[-1].messages
    first_reply = next(place for place, message in enumerate(last) if message["role"] == "assistant")
    episode.log.messages = last[first_reply:]


_KEY = "actor_rollout_ref.rollout.agent.program"
_THREADS = 256


def endpoint_variables(base_url: str, api_key: str) -> dict[str, str]:
    """Return the environment variables by which clients of OpenAI and of Anthropic find the endpoint.

    Anthropic's clients add ``/v1`` to their base URL themselves. Both names of the key are set, so that none of the user's is sent.
    """
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "OPENAI_MODEL": MODEL,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ANTHROPIC_AUTH_TOKEN": api_key,
        "ANTHROPIC_MODEL": MODEL,
    }


@AGENT_LOOPS.register("program")
class ProgramLoop(EndpointLoop):
    """Loop that runs ``agent.program.command`` or calls ``agent.program.function`` once per episode."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._config = context.agent.program
        if bool(self._config.command) == bool(self._config.function):
            raise ConfigError(
                "the agent loop 'program' needs either a command or a function, but "
                + ("has both" if self._config.command else "has neither"),
                where=_KEY,
                fix=f"{_KEY}.command=[python,my_agent.py], or {_KEY}.function=my_agent:play",
            )

    @property
    def timeout(self) -> float:
        return self._config.timeout

    @functools.cached_property
    def _function(self) -> Callable[..., Any]:
        return imported(self._config.function, f"{_KEY}.function")

    @functools.cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(_THREADS, thread_name_prefix="hone-agent")

    async def run(self, episode: Episode, *, base_url: str, api_key: str) -> ProgramOutcome:
        row = row_of(episode)
        if self._config.command:
            variables = endpoint_variables(base_url, api_key)
            command = [sys.executable if word == "python" else word for word in self._config.command]
            return await run_program(command, row, variables)
        call = functools.partial(self._function, row, base_url=base_url, api_key=api_key, model=MODEL)
        try:
            if inspect.iscoroutinefunction(self._function):
                return ProgramOutcome.parse(await call())
            return ProgramOutcome.parse(await asyncio.get_running_loop().run_in_executor(self._threads, call))
        except (ProgramFailed, asyncio.CancelledError):
            raise
        except Exception as error:
            raise ProgramFailed(f"the agent raised {type(error).__name__}: {error}") from error
