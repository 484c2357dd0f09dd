"""Record of an episode besides its tokens: how it ended, its conversation, tool calls and rewards."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class EpisodeEnd(StrEnum):
    """Reason for the end of an episode."""

    ANSWER = "answer"  # the model ended its turn without a tool call
    DONE = "done"  # the environment or the simulated user ended the episode
    TOKENS = "tokens"  # ``data.max_response_length``: sampled tokens, tool results and user turns together
    CONTEXT = "context"  # ``multi_turn.compaction.context_tokens``: the rewritten conversation does not fit either
    ASSISTANT_TURNS = "assistant_turns"  # ``multi_turn.max_assistant_turns``
    USER_TURNS = "user_turns"  # ``multi_turn.max_user_turns``
    TOOL_CALLS = "tool_calls"  # ``multi_turn.max_tool_calls``
    TIME = "time"  # ``multi_turn.max_episode_seconds``
    ABORTED = "aborted"  # the engine cut a turn short
    ERROR = "error"  # an error remained after all retries


class CallStatus(StrEnum):
    """Outcome of a tool call."""

    OK = "ok"
    MALFORMED = "malformed"  # the text of the call cannot be read
    UNKNOWN_TOOL = "unknown_tool"
    INVALID_ARGUMENTS = "invalid_arguments"  # the arguments do not fit the tool's schema
    OVER_LIMIT = "over_limit"
    """More calls than ``multi_turn.max_parallel_calls`` in a turn or ``max_tool_calls`` in all; the model gets a message."""
    TIMEOUT = "timeout"
    ERROR = "error"  # the tool raised


@dataclass
class CallRecord:
    """One tool call."""

    name: str  # name of the tool, as the model wrote it
    arguments: dict[str, Any] | None  # parsed arguments; None if they could not be parsed
    status: CallStatus
    result: str = ""  # text that the model received
    turn: int = 0  # number of the assistant turn that made the call
    seconds: float = 0.0  # wall time, including the wait for a free slot
    attempts: int = 1
    truncated: bool = False  # whether the result was cut
    reward: float = 0.0  # reward that the tool gave for this call
    metrics: dict[str, float] = field(default_factory=dict)  # numbers that the tool reports
    left_out: int = 0  # parts of the result that are not text, and that the model did not receive
    started: float | None = None  # seconds from the start of the episode to that of the call; None if unknown


@dataclass
class EpisodeLog:
    """Record of one episode."""

    messages: list[dict[str, Any]] = field(default_factory=list)  # the conversation after the prompt, in OpenAI form
    end: EpisodeEnd = EpisodeEnd.ANSWER  # reason for its end
    assistant_turns: int = 0
    user_turns: int = 0  # turns that a simulated user or an environment took
    calls: list[CallRecord] = field(default_factory=list)
    # reward of each assistant turn, where the environment, a tool or the user gave one, else 0
    turn_rewards: list[float] = field(default_factory=list)
    # reward that the environment, tools or user gave the episode; None leaves it to the scorer
    reward: float | None = None
    # named numbers that an environment reports at its end (``solved``, for example)
    facts: dict[str, float] = field(default_factory=dict)
    error: str | None = None  # type, message and trace of an error, None without one
    no_verdict: bool = False  # whether the error is a failure of infrastructure (:class:`~hone.errors.NoVerdict`)
    # how its tokens differ from its conversation rendered again, None if they are equal or were not compared
    tokenization: str | None = None
    retries: int = 0  # times it was played again after an error
    # conversations of sub-agents: ``messages``, the number of ``turns``, and the number of the first one
    # (``turn``)
    conversations: list[dict[str, Any]] = field(default_factory=list)
    generate_seconds: float = 0.0  # wait for the engine
    tool_seconds: float = 0.0  # wait for tools, environment and user; that for a sub-agent includes its turns
    # start and end of the wait for each assistant turn, in seconds from the start of the episode; empty if
    # unknown
    turn_times: list[list[float]] = field(default_factory=list)
    # role of the policy in each assistant turn, such as the seat of a game; empty if it has only one
    turn_roles: list[str] = field(default_factory=list)

    @property
    def is_plain(self) -> bool:
        """Return whether the episode is one answer to one prompt, fully described by its trajectory."""
        other_records = (self.messages, self.calls, self.error, self.retries, self.facts, self.reward is not None)
        return self.assistant_turns == 1 and not any(other_records)

    @property
    def num_turns(self) -> int:
        return 1 + len(self.messages)

    def summary(self) -> dict[str, Any]:
        """Return plain data for scorers and files, without wall times, so that it repeats with the run."""
        return {
            "end": self.end.value,
            "num_turns": self.num_turns,
            "assistant_turns": self.assistant_turns,
            "user_turns": self.user_turns,
            "reward": self.reward,
            "turn_rewards": list(self.turn_rewards),
            **({"turn_roles": list(self.turn_roles)} if self.turn_roles else {}),
            "facts": dict(self.facts),
            "tool_calls": [_call(call) for call in self.calls],
            "messages": self.messages,
            "error": self.error,
            "tokenization": self.tokenization,
            "retries": self.retries,
            "conversations": self.conversations,
        }

    def record(self) -> dict[str, Any]:
        """Return :meth:`summary` with the wall times: of each turn and call, and in all of the engine and of what is outside."""
        calls = [_call(call) | {"seconds": call.seconds, "started": call.started} for call in self.calls]
        times = {"generate_seconds": self.generate_seconds, "tool_seconds": self.tool_seconds}
        times |= {"turn_times": [list(turn) for turn in self.turn_times]}
        return self.summary() | {"tool_calls": calls} | times

    def costs(self) -> dict[str, Any]:
        """Return ``seconds``: of ``generate``, of ``outside`` (tools, environment, user), and of ``tools`` by name; wall times."""
        tools: dict[str, float] = {}
        for call in self.calls:
            tools[call.name] = tools.get(call.name, 0.0) + call.seconds
        return {"seconds": {"generate": self.generate_seconds, "outside": self.tool_seconds, "tools": tools}}


def _call(call: CallRecord) -> dict[str, Any]:
    return {
        "name": call.name,
        "arguments": call.arguments,
        "status": call.status.value,
        "result": call.result,
        "turn": call.turn,
        "attempts": call.attempts,
        "truncated": call.truncated,
        "left_out": call.left_out,
        "reward": call.reward,
    }
