"""Base class of agent loops, which play episodes from the prompt to the end.

>>> class TwoTries(AgentLoop):
...     \"\"\"Asks once more when the first answer is short.\"\"\"
...
...     async def play(self, episode):
...         first = await episode.generate()
...         if len(first.token_ids) < 5:
...             episode.append(self.context.tokenizer.encode(" Think again:"))
...             await episode.generate()

The loop is chosen by ``agent_name`` of a dataset row or ``actor_rollout_ref.rollout.agent.default_agent_loop``: a registered name,
or an import path such as ``my_loops:TwoTries``.
"""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from hone.agents.episode import Episode
from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.config.derived import longest_sequence
from hone.config.tree import RLConfig
from hone.registry import Registry

if TYPE_CHECKING:
    from hone.agents.interactions.base import Interaction
    from hone.agents.rendering import Renderer
    from hone.agents.tools.base import Toolbox
    from hone.data.image_processor import ImageProcessor


@dataclass
class EpisodeContext:
    """Context that all episodes of a run share: tokenizer, renderer, tools and users, each created on first use."""

    tokenizer: PreTrainedTokenizerBase  # tokenizer of the policy
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)  # config block ``multi_turn``
    agent: AgentConfig = field(default_factory=AgentConfig)  # config block ``agent``
    template_kwargs: dict[str, Any] = field(default_factory=dict)  # extra arguments of the chat template
    max_model_len: int | None = None  # maximum tokens of prompt and responses in the engine; None means unlimited
    image_processor: ImageProcessor | None = None  # of the policy; None for a model of text
    # cleanup functions that loops registered, called by :meth:`close`
    at_end: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def from_config(
        cls, config: RLConfig, tokenizer: PreTrainedTokenizerBase, image_processor: ImageProcessor | None = None
    ) -> EpisodeContext:
        """Return the context of a run."""
        rollout, data = config.actor_rollout_ref.rollout, config.data
        keywords = data.apply_chat_template_kwargs
        return cls(tokenizer, rollout.multi_turn, rollout.agent, keywords, longest_sequence(config), image_processor)

    @functools.cached_property
    def renderer(self) -> Renderer:
        """Renderer of messages to tokens and parser of tool calls."""
        from hone.agents.rendering import renderer_for

        several = self.multi_turn
        return renderer_for(
            self.tokenizer, several.renderer, parser=several.format, template_kwargs=self.template_kwargs
        )

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        """Tools of the configured tool files."""
        from hone.agents.tools.loading import load_toolbox

        return load_toolbox(self.multi_turn)

    @functools.cached_property
    def interactions(self) -> dict[str, Interaction]:
        """Simulated users of the configured file."""
        from hone.agents.interactions.loading import load_interactions

        return load_interactions(self.multi_turn.interaction_config_path)

    def close(self) -> None:
        """Stop what loops and tools have started."""
        while self.at_end:
            self.at_end.pop()()
        if "toolbox" in vars(self):
            self.toolbox.close()
            del self.toolbox


class AgentLoop(ABC):
    """Base class of agent loops. One object plays all episodes of a run concurrently; per-episode state is in the episode.

    Args:
        context: context that all episodes share.
    """

    several_turns = True
    """True if episodes can have several turns, so that the engine keeps a session KV cache between turns."""
    gives_reward = False
    """True if the loop's episodes compute their reward, so that no scorer is needed."""
    needs_messages = False
    """True if the prompt must be chat messages, because text or token ids cannot be continued as a conversation."""

    def __init__(self, context: EpisodeContext) -> None:
        self.context = context

    @abstractmethod
    async def play(self, episode: Episode) -> None:
        """Play one episode to its end.

        A limit raises :class:`~hone.agents.episode.BudgetSpent`, which must propagate. Any other exception except HoneError
        means that the episode failed: it is retried or dropped according to ``agent.on_error``.
        """


def _adopt(loop: Any, path: str) -> type[AgentLoop]:
    if not (inspect.isclass(loop) and issubclass(loop, AgentLoop)):
        raise TypeError("it should be a class derived from hone.agents.base.AgentLoop")
    if inspect.isabstract(loop):
        raise TypeError("it has no method `async def play(self, episode)`")
    return loop


AGENT_LOOPS: Registry[type[AgentLoop]] = Registry(
    "agent loop", key="actor_rollout_ref.rollout.agent.default_agent_loop", adopt=_adopt
)
"""Agent loops by name."""
