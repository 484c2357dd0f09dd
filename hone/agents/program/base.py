"""Base class of loops whose agent is external and uses an OpenAI-compatible endpoint."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from hone.agents.base import AgentLoop
from hone.agents.budget import BudgetSpent
from hone.agents.episode import Episode
from hone.agents.program.endpoint import TrainingEndpoint
from hone.agents.program.process import ProgramFailed, ProgramOutcome
from hone.data.episode_log import EpisodeEnd

if TYPE_CHECKING:
    from hone.agents.serving.session import Session


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
