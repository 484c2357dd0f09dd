"""What all episodes of a run share: tokenizer, templates, tools, users. Each is made when a loop first asks for it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from hone.config.agents import AgentConfig, MultiTurnConfig
from hone.config.tree import RLConfig

if TYPE_CHECKING:
    from hone.agents.interactions.base import Interaction
    from hone.agents.rendering import Renderer
    from hone.agents.tools.toolbox import Toolbox


@dataclass
class Setting:
    """Shared by all episodes of a run.

    Attributes:
        tokenizer: of the policy.
        multi_turn: the block ``multi_turn``.
        agent: the block ``agent``.
        template_kwargs: extra arguments of the chat template.
        context: tokens that the engine can hold, prompt included; None is no limit.
        at_end: called by :meth:`close`: what loops have started ends there.
    """

    tokenizer: PreTrainedTokenizerBase
    multi_turn: MultiTurnConfig = field(default_factory=MultiTurnConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    at_end: list[Callable[[], None]] = field(default_factory=list)

    @classmethod
    def of(cls, config: RLConfig, tokenizer: PreTrainedTokenizerBase) -> Setting:
        """The setting of a run."""
        rollout, data = config.actor_rollout_ref.rollout, config.data
        context = data.max_prompt_length + data.max_response_length
        return cls(tokenizer, rollout.multi_turn, rollout.agent, data.apply_chat_template_kwargs, context)

    @functools.cached_property
    def renderer(self) -> Renderer:
        """Puts messages behind tokens, and reads tool calls out of them.

        Raises:
            HoneError: the chat template cannot be continued.
        """
        from hone.agents.rendering import renderer_for

        several = self.multi_turn
        return renderer_for(
            self.tokenizer, several.renderer, parser=several.format, template_kwargs=self.template_kwargs
        )

    @functools.cached_property
    def toolbox(self) -> Toolbox:
        """The tools that the tool files name.

        Raises:
            ConfigError: a file is missing or wrong, or a name occurs twice.
        """
        from hone.agents.tools.loading import load_toolbox

        return load_toolbox(self.multi_turn)

    @functools.cached_property
    def interactions(self) -> dict[str, Interaction]:
        """The simulated users that the file names.

        Raises:
            ConfigError: the file is missing or wrong.
        """
        from hone.agents.interactions.loading import load_interactions

        return load_interactions(self.multi_turn.interaction_config_path)

    def close(self) -> None:
        """End what loops and tools have started."""
        while self.at_end:
            self.at_end.pop()()
        if "toolbox" in vars(self):
            self.toolbox.close()
            del self.toolbox
