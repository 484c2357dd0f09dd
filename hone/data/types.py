"""The records that cross between rooms: a dataset row going in, an episode coming out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from hone.data.episode_log import EpisodeLog


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The token limit."""
    TOOL_CALL = "tool_call"
    """A tool call that the agent loop must carry out."""
    ABORTED = "aborted"
    """Cancelled by the caller; the tokens so far are valid."""
    ERROR = "error"
    """The engine failed."""


@dataclass
class Sample:
    """One dataset row, ready to be asked.

    Attributes:
        uid: identity of the row within its dataset; names the prompt group.
        prompt_ids: the rendered prompt as token ids, chat template and generation prompt included.
        messages: the chat messages behind it, or None when the row held a string or token ids.
        data_source: kind of problem; selects the scorer and groups validation metrics.
        ground_truth: ``reward_model.ground_truth`` of the row, passed to the scorer.
        extra_info: ``extra_info`` of the row, passed to the scorer; for an agent loop also ``tools_kwargs``,
            ``tool_selection``, ``interaction_kwargs`` and ``environment``.
        agent_name: the agent loop that plays the row, None for the run's.
    """

    uid: str
    prompt_ids: list[int]
    messages: list[dict[str, Any]] | None
    data_source: str
    ground_truth: Any = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    agent_name: str | None = None


@dataclass
class Trajectory:
    """What one episode leaves. Text is never re-tokenized: the tokens trained on are the tokens sampled.

    Attributes:
        uid: the prompt group it belongs to (``Sample.uid``).
        index: its number within the group, 0 to n - 1.
        prompt_ids: the prompt's token ids, length P.
        response_ids: everything after the prompt, length T.
        response_mask: 1 exactly on tokens that the policy sampled, length T.
        rollout_log_probs: log-prob of every sampled token under the temperature-scaled policy, length T.
        sampling_log_probs: log-prob under the distribution really sampled from (after top-k, top-p, min-p and
            repetition penalty), length T; equal to ``rollout_log_probs`` when nothing was truncated.
        text: what the policy wrote, decoded without special tokens: all its turns, joined by newlines, and nothing that it did
            not write (no tool results).
        stop_reason: why the last turn ended.
        sample: the dataset row asked.
        weight_versions: first and last version of the weights that produced it.
        seconds: wall time from admission to the last token.
        episode: what else happened; None for an episode of one turn.
        part: number of this trajectory among those that the episode left: more than one where its history was rewritten.
    """

    uid: str
    index: int
    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    rollout_log_probs: list[float]
    sampling_log_probs: list[float]
    text: str
    stop_reason: StopReason
    sample: Sample
    weight_versions: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    episode: EpisodeLog | None = None
    part: int = 0
