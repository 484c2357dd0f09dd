"""Loops whose agent lives elsewhere and only knows an OpenAI-compatible endpoint: what they share."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from hone.agents.base import AgentLoop
from hone.agents.budget import BudgetSpent
from hone.agents.episode import Episode
from hone.agents.program.endpoint import TrainingEndpoint
from hone.agents.program.process import Outcome, ProgramFailed
from hone.data.episode_log import EpisodeEnd

if TYPE_CHECKING:
    from hone.agents.serving.session import Session


class EndpointLoop(AgentLoop):
    """Gives every episode a session on an endpoint, has it played there, and keeps what was sampled.

    The agent builds its own prompts and carries out its own tools. Each of its calls is recorded as the tokens that the model
    was given and sampled; what it makes of one conversation is one trajectory, and if it begins several, or rewrites its history,
    they are parts of the episode.
    """

    gives_reward = True

    def __init__(self, setting: Any) -> None:
        super().__init__(setting)
        self._endpoint: TrainingEndpoint | None = None

    @property
    @abstractmethod
    def timeout(self) -> float:
        """Seconds that an episode may take."""

    @abstractmethod
    async def run(self, episode: Episode, *, base_url: str, api_key: str) -> Outcome:
        """Have an episode played by an agent that is given this endpoint and the key of the episode's session.

        Raises:
            ProgramFailed: it did not get to its end.
        """

    async def play(self, episode: Episode) -> None:
        """Run the agent; keep what it asked the model, and what it says of it."""
        if self._endpoint is None:
            self._endpoint = TrainingEndpoint(self.setting, episode.client)
            self.setting.at_end.append(self._endpoint.stop)
        endpoint = self._endpoint
        session = endpoint.open(episode)
        try:
            outcome = await episode.outside(self.run(episode, base_url=endpoint.url, api_key=session.key), self.timeout)
        except TimeoutError:
            raise ProgramFailed(f"the agent took more than {self.timeout:g} s") from None
        except ProgramFailed:
            if not session.counts["refused"]:
                raise
            outcome = Outcome(reward=0.0)  # it did not get to its end: a limit stood before it
        finally:
            await endpoint.close(session)
            keep(session, episode)
        if not session.turns:
            raise ProgramFailed("the agent ended without asking the model anything")
        episode.log.reward, episode.answer = outcome.reward, outcome.text
        episode.log.facts |= outcome.facts
        if session.counts["refused"]:
            raise BudgetSpent(EpisodeEnd.TOKENS)


def row_of(episode: Episode) -> dict[str, Any]:
    """What an agent is told of its episode."""
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


def keep(session: Session, episode: Episode) -> None:
    """Put what a session recorded into the episode: its conversations become the parts."""
    ledgers = session.ledgers()
    if not ledgers:
        return
    episode.adopt(ledgers)
    last = session.turns[-1].messages
    first_reply = next(place for place, message in enumerate(last) if message["role"] == "assistant")
    episode.log.messages = last[first_reply:]
