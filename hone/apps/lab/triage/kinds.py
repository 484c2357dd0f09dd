"""Kinds of failure of an episode, each with the part of a run that it points to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Bucket(StrEnum):
    """Part of a run that a failure points to, in the order in which to look."""

    RUNTIME = "runtime"
    """Tools, environments, scorers or the sandbox did not work."""
    DATA = "data"
    """Rows, prompts or demonstrations."""
    REWARD = "reward"
    """The score is not what the task means."""
    CONFIG = "config"
    """A limit or a format of the configuration."""


class Kind(StrEnum):
    """Kind of failure."""

    SCORER_DOWN = "scorer_down"
    EPISODE_ERROR = "episode_error"
    TOOL_ERROR = "tool_error"
    TOOL_TIMEOUT = "tool_timeout"
    TIME_LIMIT = "time_limit"
    SCORER_ERROR = "scorer_error"
    HACKED = "hacked"
    RIGHT_REJECTED = "right_rejected"
    NO_GROUND_TRUTH = "no_ground_truth"
    HALLUCINATED_TOOL = "hallucinated_tool"
    INVALID_ARGUMENTS = "invalid_arguments"
    MALFORMED_CALL = "malformed_call"
    REPEATED_CALL = "repeated_call"
    TOO_MANY_CALLS = "too_many_calls"
    CUT = "cut"
    TURN_LIMIT = "turn_limit"
    EMPTY = "empty"
    NO_TOOL_CALL = "no_tool_call"
    WRONG_FORMAT = "wrong_format"
    WRONG_CONTENT = "wrong_content"


@dataclass(frozen=True)
class About:
    """Bucket and meaning of a kind of failure."""

    bucket: Bucket  # part of the run that it points to
    meaning: str  # what was seen, in a few words


KINDS: dict[Kind, About] = {
    Kind.SCORER_DOWN: About(Bucket.RUNTIME, "no verdict: the scorer, its service or the sandbox did not answer"),
    Kind.EPISODE_ERROR: About(Bucket.RUNTIME, "the environment, the agent loop or the engine failed"),
    Kind.TOOL_ERROR: About(Bucket.RUNTIME, "a tool raised an error"),
    Kind.TOOL_TIMEOUT: About(Bucket.RUNTIME, "a tool took too long"),
    Kind.TIME_LIMIT: About(Bucket.RUNTIME, "the episode ran out of time"),
    Kind.SCORER_ERROR: About(Bucket.REWARD, "no verdict: the reward function raised or returned no usable score"),
    Kind.HACKED: About(Bucket.REWARD, "a high reward for a wrong answer"),
    Kind.RIGHT_REJECTED: About(Bucket.REWARD, "the answer ends with the expected text, and the reward is low"),
    Kind.NO_GROUND_TRUTH: About(Bucket.DATA, "the row has no expected answer, others of its source have one"),
    Kind.HALLUCINATED_TOOL: About(Bucket.DATA, "a call of a tool that does not exist"),
    Kind.INVALID_ARGUMENTS: About(Bucket.DATA, "arguments that do not fit the tool's schema"),
    Kind.MALFORMED_CALL: About(Bucket.CONFIG, "a call that cannot be read"),
    Kind.REPEATED_CALL: About(Bucket.CONFIG, "the same call again and again"),
    Kind.TOO_MANY_CALLS: About(Bucket.CONFIG, "more calls than a limit allows"),
    Kind.CUT: About(Bucket.CONFIG, "cut at the limit of tokens"),
    Kind.TURN_LIMIT: About(Bucket.CONFIG, "ended by a limit of turns"),
    Kind.EMPTY: About(Bucket.CONFIG, "an answer without text"),
    Kind.NO_TOOL_CALL: About(Bucket.DATA, "no call, and most right answers of the task have one"),
    Kind.WRONG_FORMAT: About(Bucket.DATA, "an answer in which the scorer finds none"),
    Kind.WRONG_CONTENT: About(Bucket.DATA, "the right form, and a wrong answer"),
}
"""Every kind, those that hide the others first: the order decides between failures of the same turn."""
