"""Compaction: a conversation that would outgrow its context is rewritten, and the episode continues as a new segment.

``summarize``: the policy writes a summary, which is in the next segment's prompt in place of the conversation. It is sampled
and trained like every other turn, so a reward teaches what is worth writing down. ``drop_results``: the contents of older tool results
are removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hone.agents.messages import Message
from hone.config.agents import CompactionConfig, MultiTurnConfig

REMOVED = "(result removed)"
"""Content of a tool result that was dropped."""
SUMMARY = "What happened so far:"
"""Line before a summary."""


class Compactor:
    """Decides when a conversation is rewritten, and how."""

    def __init__(self, multi_turn: MultiTurnConfig) -> None:
        self.config: CompactionConfig = multi_turn.compaction
        self.reserve = compaction_reserve(multi_turn)

    @property
    def asks(self) -> bool:
        return self.config.strategy == "summarize"

    @property
    def instruction(self) -> Message:
        """Message that asks for a summary."""
        return {"role": "user", "content": self.config.instruction}

    def is_due(self, tokens: int, turn: int) -> bool:
        """Return whether a conversation of ``tokens`` is rewritten before a next turn of at most ``turn`` tokens."""
        limit = self.config.context_tokens
        return self.config.strategy is not None and limit is not None and tokens + turn + self.reserve > limit

    def without_results(self, messages: Sequence[Message]) -> list[Message]:
        """Return the conversation without the contents of its tool results, except those of the latest ``keep_turns`` turns."""
        kept = len(messages) - len(latest_turns(messages, max(1, self.config.keep_turns)))
        return [
            {**message, "content": REMOVED} if message["role"] == "tool" and place < kept else message
            for place, message in enumerate(messages)
        ]

    def summarized(self, prompt: Sequence[Message], messages: Sequence[Message], summary: str) -> list[Message]:
        """Return the conversation that follows a summary.

        Args:
            prompt: messages of the episode's prompt; the summary is added to the last one of the user.
            messages: the conversation before the request for a summary.
            summary: text of the policy.
        """
        last = max((place for place, message in enumerate(prompt) if message["role"] == "user"), default=None)
        note = f"{SUMMARY}\n{summary}"
        if last is None:
            begin = [*prompt, {"role": "user", "content": note}]
        else:
            request: dict[str, Any] = {**prompt[last], "content": f"{prompt[last]['content']}\n\n{note}"}
            begin = [*prompt[:last], request, *prompt[last + 1 :]]
        return [*begin, *latest_turns(messages, self.config.keep_turns)]


def latest_turns(messages: Sequence[Message], count: int) -> list[Message]:
    """Return the last ``count`` turns of the policy, each with the messages that follow it."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    return list(messages[turns[-min(count, len(turns))] :]) if count and turns else []


_WRAPPER_TOKENS, _REQUEST_TOKENS = 32, 64
"""Upper bounds of the usual templates: tokens around a tool result, and those of the request for a summary."""


def compaction_reserve(multi_turn: MultiTurnConfig) -> int:
    """Return the tokens that stay free after a turn: for the results of its calls, and for a summary with its request."""
    config = multi_turn.compaction
    if config.reserve_tokens is not None:
        return config.reserve_tokens
    results = multi_turn.max_parallel_calls * (multi_turn.max_tool_response_length + _WRAPPER_TOKENS)
    return results + (config.max_summary_tokens + _REQUEST_TOKENS if config.strategy == "summarize" else 0)
